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
from pipeline.quality.i420 import to_rgb
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
    assert sum(sizes) < 16_000_000


def test_its_name_and_defaults_come_from_its_own_file(model: ResolvedModel) -> None:
    spec = model.spec
    assert model.display_name == "built-in demonstration model"
    assert (spec.default_width, spec.default_height, spec.default_num_frames) == (64, 64, 17)
    assert (spec.default_fps, spec.default_steps, spec.default_guidance_scale) == (8, 20, 3.0)
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


def test_it_shows_the_colours_that_the_prompt_names(model: ResolvedModel, engine: Engine) -> None:
    colours = {
        "a red circle moves left on a blue background": ("red", "blue"),
        "a blue square on red": ("blue", "red"),
    }
    for prompt, (main, background) in colours.items():
        job = make_job(model, prompt=prompt, negative_prompt="", steps=20, guidance_scale=3.0)
        (clip,) = engine.render(make_batch(model, job)).clips
        assert clip.frames is not None
        rgb = to_rgb(clip.frames)[0].astype(int)
        channel = {"red": 0, "blue": 2}
        corner = rgb[:6, :6].mean(axis=(0, 1))
        assert corner.argmax() == channel[background], (prompt, corner)
        shown = (rgb.argmax(axis=2) == channel[main]).mean()
        assert 0.02 < shown < 0.6, (prompt, main, shown)


def test_words_it_does_not_know_give_a_clip_all_the_same(model: ResolvedModel, engine: Engine) -> None:
    prompts = ["a cat", "字🙂", "", "a person is playing the accordion in a rainy street"]
    jobs = [make_job(model, id=prompt, prompt=prompt, negative_prompt="", steps=4) for prompt in prompts]
    jobs += [make_job(model, id="another seed", prompt="a cat", negative_prompt="", seed=2, steps=4)]
    clips = [clip.frames for clip in engine.render(make_batch(model, *jobs)).clips]
    for one, other in combinations(clips, 2):
        assert one is not None
        assert other is not None
        assert np.abs(one.astype(int) - other).mean() > 1


def test_its_smallest_largest_and_longest_clips_render(model: ResolvedModel, engine: Engine) -> None:
    for width, height, num_frames in ((16, 16, 81), (256, 16, 1), (16, 256, 2)):
        job = make_job(model, width=width, height=height, num_frames=num_frames, steps=1)
        (clip,) = engine.render(make_batch(model, job)).clips
        assert clip.frames is not None
        assert clip.frames.shape == (num_frames, height * 3 // 2, width)
