"""The model that ships with the product."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.engine import Engine
from pipeline.models import tiny
from pipeline.models.resolve import ResolvedModel, resolve_model
from pipeline.models.text import clean_prompt
from pipeline.models.tiny import build
from tests.pipeline_checkpoints import make_batch, make_engine, make_job

FOLDER = Path(tiny.__file__).parent


@pytest.fixture(scope="module")
def model() -> ResolvedModel:
    return resolve_model("builtin")


@pytest.fixture(scope="module")
def engine(model: ResolvedModel) -> Engine:
    return make_engine(model)


def test_it_is_small() -> None:
    sizes = [file.stat().st_size for file in FOLDER.rglob("*") if file.suffix not in (".py", ".pyc")]
    assert sum(sizes) < 3_000_000


def test_its_name_and_defaults_come_from_its_own_file(model: ResolvedModel) -> None:
    spec = model.spec
    assert model.display_name == "built-in demonstration model"
    assert (spec.default_width, spec.default_height, spec.default_num_frames) == (64, 64, 17)
    assert (spec.default_fps, spec.default_steps, spec.default_guidance_scale) == (8, 20, 4.0)
    assert (spec.min_side, spec.max_side, spec.max_frames) == (16, 256, 81)
    assert spec.resolutions["64p"] == (64, 64)
    assert spec.default_negative_prompt == ""
    for width, height in spec.resolutions.values():
        assert width % spec.multiple == height % spec.multiple == 0
        assert spec.min_side <= min(width, height) <= max(width, height) <= spec.max_side


@pytest.mark.parametrize("prompt", ["a cat", "字" * 90, "🙂", "naïve Ελληνικά", "\\ ~ ` @ \x7f"])
def test_it_can_read_every_prompt(prompt: str) -> None:
    encoding = Tokenizer.from_file(str(FOLDER / "tokenizer" / "tokenizer.json")).encode(clean_prompt(prompt))
    assert "<unk>" not in encoding.tokens
    assert encoding.tokens[-1] == "</s>"


def test_a_prompt_of_common_words_takes_about_a_token_a_word(model: ResolvedModel) -> None:
    assert list(model.spec.count_tokens(["a red balloon flying over the sea", "word " * 600])) == [8, 3001]


def test_every_prompt_and_seed_gives_another_colourful_clip(model: ResolvedModel, engine: Engine) -> None:
    prompts = ["a cat", "a dog", "字🙂", ""]
    jobs = [make_job(model, id=prompt, prompt=prompt, negative_prompt="") for prompt in prompts]
    jobs += [make_job(model, id="another seed", prompt="a cat", negative_prompt="", seed=2)]
    clips = [clip.frames for clip in engine.render(make_batch(model, *jobs)).clips]
    for frames in clips:
        assert frames is not None
        assert frames[:, :64].std() > 15
        assert frames[:, 64:].std() > 5
        assert np.abs(np.diff(frames.astype(int), axis=0)).mean() > 2
    for one, other in combinations(clips, 2):
        assert np.abs(one.astype(int) - other).mean() > 5


def test_its_smallest_largest_and_longest_clips_render(model: ResolvedModel, engine: Engine) -> None:
    for width, height, num_frames in ((16, 16, 81), (256, 16, 1), (16, 256, 2)):
        job = make_job(model, width=width, height=height, num_frames=num_frames, steps=1)
        (clip,) = engine.render(make_batch(model, job)).clips
        assert clip.frames is not None
        assert clip.frames.shape == (num_frames, height * 3 // 2, width)


def test_building_it_again_gives_the_same_configs_and_vocabulary(tmp_path: Path) -> None:
    build.main(tmp_path)
    built = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file())
    shipped = {file.relative_to(FOLDER) for file in FOLDER.rglob("*") if file.is_file()}
    assert set(built) <= shipped
    for name in ("vgbatch.json", "model_index.json", "tokenizer/tokenizer.json", "transformer/config.json"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
