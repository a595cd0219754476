"""The time of a denoising step, measured on the engine itself with tiny checkpoints on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.errors import OutOfDeviceMemory
from manifests.job import Bucket
from pipeline.engine import Engine
from pipeline.memory import stepping
from pipeline.models.resolve import resolve_model
from pipeline.models.wan_denoiser import WanDenoiser
from tests.pipeline_checkpoints import build_checkpoint, make_batch, make_engine, make_job


class Case:
    """An engine over a tiny checkpoint, and what its denoisers were called with."""

    def __init__(self, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model = resolve_model(str(build_checkpoint(folder, kind)))
        self.engine: Engine = make_engine(model)
        self.bucket: Bucket = make_batch(model, make_job(model)).bucket
        self.shapes: list[tuple[int, ...]] = []
        self.scales: list[float] = []
        denoise = WanDenoiser.__call__

        def watched(denoiser: WanDenoiser, latents: torch.Tensor, **step: Any) -> torch.Tensor:
            self.shapes.append(tuple(latents.shape))
            self.scales.append(step["guidance_scale"])
            return denoise(denoiser, latents, **step)

        monkeypatch.setattr(WanDenoiser, "__call__", watched)
        monkeypatch.setattr(stepping, "TIMED_S", 0.0)


@pytest.mark.parametrize("kind", ["t2v", "ti2v", "a14b"])
def test_steps_of_a_whole_batch_are_timed_after_warming_up(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, kind, monkeypatch)
    times = case.engine.probe(case.bucket, size=3)
    assert times.step_s > 0
    assert times.peak_memory_bytes > 0
    size = {"width": 64, "height": 64, "num_frames": 9}
    latent_shape = case.engine._model(case.bucket).latent_shape(**size)
    assert case.shapes == [(3, *latent_shape)] * (stepping.WARM_UP_STEPS + stepping.TIMED_STEPS)
    assert set(case.scales) == {case.bucket.guidance_scale}


def test_short_steps_are_timed_until_they_fill_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, "t2v", monkeypatch)
    clock = iter(range(1_000))
    monkeypatch.setattr("pipeline.timing.time.monotonic", lambda: next(clock))  # a second a step
    monkeypatch.setattr(stepping, "TIMED_S", 20.0)
    assert case.engine.probe(case.bucket, size=1).step_s == 1.0
    assert len(case.shapes) == stepping.WARM_UP_STEPS + 20


def test_a_bucket_without_guidance_is_timed_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, "t2v", monkeypatch)
    case.engine.probe(replace(case.bucket, guidance_scale=0.5), size=1)
    assert set(case.scales) == {1.0}


def test_a_batch_that_does_not_fit_is_told_apart_and_a_smaller_one_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, "t2v", monkeypatch)
    denoise = WanDenoiser.__call__

    def small(denoiser: WanDenoiser, latents: torch.Tensor, **step: Any) -> torch.Tensor:
        if len(latents) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore of it")
        return denoise(denoiser, latents, **step)

    monkeypatch.setattr(WanDenoiser, "__call__", small)
    with pytest.raises(OutOfDeviceMemory, match=r"4 clips of 64x64x9 4 steps: CUDA out of memory"):
        case.engine.probe(case.bucket, size=4)
    assert case.engine.probe(case.bucket, size=2).step_s > 0
