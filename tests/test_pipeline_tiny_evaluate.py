"""The evaluation renders what the engine renders, and loses no clip on the way to its judges."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.frames import to_frames
from pipeline.models.resolve import ResolvedModel, resolve_model
from pipeline.models.tiny.evaluate import FEW_STEPS, Score, Setting, _Judges, _loaded, evaluate, sample, table
from pipeline.models.tiny.render import render
from pipeline.models.tiny.scenes import sample_scenes
from pipeline.models.wan import WanModel
from pipeline.quality.i420 import to_rgb
from pipeline.quality.oracle import read_clip
from tests.pipeline_checkpoints import make_batch, make_engine, make_job

PLAIN = Setting(name="4 steps", steps=FEW_STEPS, guidance_scale=1.0)


PROMPTS = ["a red circle moves left", "a blue square grows on a white background"]
SEEDS = [5, 2**40]


@pytest.fixture(scope="module")
def builtin() -> ResolvedModel:
    return resolve_model("builtin")


def two_clips(model: WanModel, **settings: Any) -> list[npt.NDArray[np.uint8]]:
    sampling = {"steps": 2, "guidance_scale": 1.0, "flow_shift": 3.0, "negative_prompt": ""} | settings
    return list(sample(model, (64, 64, 17), PROMPTS, SEEDS, device="cpu", **sampling))


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_it_samples_the_clips_that_the_engine_renders(builtin: ResolvedModel, guidance_scale: float) -> None:
    sampled = two_clips(_loaded(builtin, False, "cpu"), guidance_scale=guidance_scale)
    settings = {"negative_prompt": "", "num_frames": 17, "steps": 2, "guidance_scale": guidance_scale}
    jobs = [
        make_job(builtin, id=prompt, prompt=prompt, seed=seed, **settings)
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]
    rendered = make_engine(builtin).render(make_batch(builtin, *jobs)).clips
    for frames, clip in zip(sampled, rendered, strict=True):
        assert clip.frames is not None
        assert frames.std() > 10
        assert np.abs(frames.astype(int) - clip.frames).max() <= 1


def test_the_few_step_update_changes_what_is_sampled(builtin: ResolvedModel) -> None:
    plain, few_step = (two_clips(_loaded(builtin, which, "cpu")) for which in (False, True))
    for one, other in zip(plain, few_step, strict=True):
        assert np.abs(one.astype(int) - other).mean() > 1


def test_judges_of_other_processes_read_the_same_in_the_same_order() -> None:
    scenes = sample_scenes(np.random.default_rng(0), 23, width=64, height=64)
    clips = [
        to_frames(video, width=64, height=64, num_frames=17)
        for video in render(scenes).permute(0, 4, 1, 2, 3)
    ]
    with _Judges(50) as judges:
        readings = judges.read(iter(clips))
    assert readings == [read_clip(to_rgb(clip)) for clip in clips]
    assert len(set(readings)) > 10


def test_it_says_on_stderr_how_far_it_is(builtin: ResolvedModel, capsys: pytest.CaptureFixture[str]) -> None:
    (score,) = evaluate(builtin.source.folder, [PLAIN], device="cpu", num_captions=3, num_seeds=1)
    said = capsys.readouterr()
    assert score.num_clips == 3
    assert said.err.startswith("4 steps: 3 of 3 clips, ")
    assert said.out == ""


def test_the_table_has_a_row_for_each_score() -> None:
    score = Score(setting=PLAIN, num_clips=8, colour=1.0, shape=0.875, motion=0.5, all_three=0.25)
    assert table([score, score]).splitlines()[2:] == ["| 4 steps | 8 | 100.0% | 87.5% | 50.0% | 25.0% |"] * 2
