"""An engine without a model: frames depend on the seed alone. Knobs make it fail in every known way.

Every batch it is given goes to `log` as one JSON line: ids, settings, size, model calls. So do the prompts
that it is to encode, and every size of a bucket that it is to probe.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import jobs.verification.frames
import jobs.worker
from manifests.errors import NonFiniteOutput, OutOfDeviceMemory, OutOfSpace
from manifests.job import Batch, Bucket, Job
from pipeline.rendering import RenderedClip, Rendering, StageTimes, StepTimes
from storage.video import ClipMetadata, EncodedClip, encode_clip


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Which ids misbehave, and how. Files named by `once` make a fault happen only while they exist.

    brighter: levels that a preset adds to luma. black_in, non_finite_in: presets whose clips are broken.
    full_frames: the disk is full when frames of a verification are kept.
    A probe finds the seconds a clip and step of clip_step_s, by batch size, and GiB as many as the size.
    """

    log: Path | None = None
    raise_on: frozenset[str] = frozenset()
    exit_on: frozenset[str] = frozenset()
    hang_on: frozenset[str] = frozenset()
    poison_on: frozenset[str] = frozenset()
    non_finite_on: frozenset[str] = frozenset()
    wrong_count_on: frozenset[str] = frozenset()
    delay_s: Mapping[str, float] = field(default_factory=dict)
    encode_s: float = 0.0
    max_batch: int | None = None
    while_exists: Path | None = None
    fail_start: bool = False
    remove_folder: Path | None = None
    remove_file: Path | None = None
    no_space_on: frozenset[str] = frozenset()
    clip_step_s: Mapping[int, float] = field(default_factory=lambda: {1: 1.0, 2: 0.5, 4: 0.4, 8: 0.4})
    hang_at_size: int | None = None
    exit_at_size: int | None = None
    brighter: Mapping[str, int] = field(default_factory=dict)
    black_in: frozenset[str] = frozenset()
    non_finite_in: frozenset[str] = frozenset()
    full_frames: bool = False

    def renderer(self) -> Any:
        """A picklable factory for workers."""
        return partial(FakeEngine, knobs=self)

    def step_timer(self) -> Any:
        """The same for a probe's worker."""
        return partial(_step_timer, knobs=self)


def _step_timer(device: str, *, knobs: Knobs) -> Any:
    from jobs.probing import StepTimer  # the workers of most tests start faster without its imports

    return StepTimer(FakeEngine(device, knobs=knobs))


class FakeEngine:
    def __init__(self, device: str, *, knobs: Knobs) -> None:
        if knobs.fail_start:
            raise RuntimeError("no such device")
        self.gpu_name = f"fake {device}"
        self._knobs = knobs
        self._poisoned = False
        if knobs.no_space_on:
            jobs.worker.encode_clip = partial(_encode_on_full_disk, ids=knobs.no_space_on)
        if knobs.full_frames:
            jobs.verification.frames.frames_file = lambda folder, id: Path("/dev/full")

    def encode(self, bucket: Bucket, texts: Sequence[str]) -> None:
        self._append({"encode": bucket.model, "texts": list(texts)})
        time.sleep(self._knobs.encode_s)

    def render(self, batch: Batch) -> Rendering:
        self._write_log(batch)
        ids = {job.id for job in batch.jobs}
        self._misbehave(batch, ids)
        for job in batch.jobs:
            time.sleep(self._knobs.delay_s.get(job.id, 0.0))
        return Rendering(
            clips=tuple(self._clip(job) for job in batch.jobs),
            times=StageTimes(load_s=0.0, encode_s=0.0, denoise_s=0.001, decode_s=0.0),
            peak_memory_bytes=1,
        )

    def probe(self, bucket: Bucket, *, size: int) -> StepTimes:
        self._append({"probe": bucket.label, "size": size})
        knobs = self._knobs
        if knobs.max_batch is not None and size > knobs.max_batch:
            raise OutOfDeviceMemory(f"out of memory at batch size {size}")
        if size == knobs.hang_at_size:
            threading.Event().wait()
        if size == knobs.exit_at_size:
            os._exit(1)
        return StepTimes(step_s=size * knobs.clip_step_s[size], peak_memory_bytes=size * 2**30)

    def _misbehave(self, batch: Batch, ids: set[str]) -> None:
        knobs = self._knobs
        while knobs.remove_folder is not None and knobs.remove_folder.exists():  # someone may write there
            shutil.rmtree(knobs.remove_folder, ignore_errors=True)
        if knobs.remove_file is not None:
            knobs.remove_file.unlink(missing_ok=True)
        if knobs.max_batch is not None and batch.size > knobs.max_batch:
            raise OutOfDeviceMemory(f"out of memory at batch size {batch.size}")
        if knobs.while_exists is not None and not knobs.while_exists.exists():
            return
        if self._poisoned or ids & knobs.poison_on:
            self._poisoned = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if ids & knobs.exit_on:
            os._exit(1)
        if ids & knobs.hang_on:
            threading.Event().wait()
        if ids & knobs.raise_on:
            raise ValueError(f"cannot render {sorted(ids & knobs.raise_on)}")

    def _clip(self, job: Job) -> RenderedClip:
        knobs = self._knobs
        if job.id in knobs.non_finite_on or job.preset in knobs.non_finite_in:
            return RenderedClip(
                job_id=job.id,
                frames=None,
                error=NonFiniteOutput("non-finite output: 1 pixel", hint="try another seed"),
            )
        frames = frames_of(job, num_frames=job.num_frames - (job.id in knobs.wrong_count_on))
        frames[:, : job.height] += np.uint8(knobs.brighter.get(job.preset, 0))
        if job.preset in knobs.black_in:
            frames[:, : job.height] = 16
        return RenderedClip(job_id=job.id, frames=frames)

    def _write_log(self, batch: Batch) -> None:
        bucket = batch.bucket
        calls = bucket.steps * (2 if bucket.guidance_scale > 1 else 1)
        entry = {
            "ids": [job.id for job in batch.jobs],
            "negative_prompts": [job.negative_prompt for job in batch.jobs],
            "size": batch.size,
            "steps": bucket.steps,
            "guidance_scale": bucket.guidance_scale,
            "flow_shift": bucket.flow_shift,
            "model_calls": calls,
        }
        self._append(entry)

    def _append(self, entry: Mapping[str, Any]) -> None:
        if self._knobs.log is None:
            return
        with open(self._knobs.log, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _encode_on_full_disk(
    frames: np.ndarray, *, metadata: ClipMetadata, ids: frozenset[str], **settings: Any
) -> EncodedClip:
    if metadata.id in ids:
        raise OutOfSpace("ffmpeg failed encoding: exit code 228\nNo space left on device")
    return encode_clip(frames, metadata=metadata, **settings)


def frames_of(job: Job, *, num_frames: int | None = None) -> np.ndarray:
    """Planar I420 frames whose grey level walks on from one that the seed picks."""
    count = job.num_frames if num_frames is None else num_frames
    frames = np.full((count, job.height * 3 // 2, job.width), 128, dtype=np.uint8)
    for index in range(count):
        frames[index, : job.height] = 32 + (job.seed * 37 + index * 8) % 192
    return frames


def read_log(log: Path) -> list[dict[str, Any]]:
    """The batches the engines of a run were given, in order."""
    return [entry for entry in _entries(log) if "encode" not in entry]


def read_encoded(log: Path) -> list[list[str]]:
    """The prompts that the engines of a run were told to encode, call by call."""
    return [entry["texts"] for entry in _entries(log) if "encode" in entry]


def _entries(log: Path) -> list[dict[str, Any]]:
    return [json.loads(entry) for entry in log.read_text(encoding="utf-8").splitlines()]
