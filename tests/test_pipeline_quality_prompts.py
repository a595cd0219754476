"""What clips are compared on: always the same, each its own, captions only for a model that reads them."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.models.tiny.captions import evaluation_cases
from pipeline.models.tiny.evaluate import _FIRST_SEED
from pipeline.quality.prompts import held_out_captions, understands_captions, varied_prompts

TINY = Path(__file__).parent.parent / "pipeline" / "models" / "tiny"


def test_captions_are_those_of_the_model_card_with_its_noise() -> None:
    prompts = held_out_captions(600)
    cases = evaluation_cases()
    assert [prompt.truth for prompt in prompts] == cases * 3
    assert [prompt.text for prompt in prompts] == [case.caption for case in cases] * 3
    assert [prompt.seed for prompt in prompts] == list(range(_FIRST_SEED, _FIRST_SEED + 600))
    assert len({prompt.id for prompt in prompts}) == 600


def test_fewer_clips_are_the_first_of_more() -> None:
    assert held_out_captions(7) == held_out_captions(600)[:7]
    assert varied_prompts(5) == varied_prompts(None)[:5]


def test_varied_prompts_are_each_their_own_and_go_round_with_other_noise() -> None:
    prompts = varied_prompts(None)
    assert len({prompt.text for prompt in prompts}) == len(prompts) == 12
    again = varied_prompts(13)[12]
    assert again.text == prompts[0].text
    assert again.seed not in {prompt.seed for prompt in prompts}
    assert {prompt.truth for prompt in prompts} == {None}


def test_the_built_in_model_is_known_wherever_it_lies(tmp_path: Path) -> None:
    assert understands_captions(TINY)
    assert not understands_captions(tmp_path)
    (tmp_path / "vgbatch.json").write_text(json.dumps({"display_name": "another"}))
    assert not understands_captions(tmp_path)
    (tmp_path / "vgbatch.json").write_bytes((TINY / "vgbatch.json").read_bytes())
    assert understands_captions(tmp_path)
