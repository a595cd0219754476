"""What an engine is and what it gives back; numpy only, so that fakes need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from manifests.errors import JobError
from manifests.job import Batch, Bucket


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds on a monotonic clock. load_s: what serves other batches too, such as
    reading weights and compiling kernels."""

    load_s: float = 0.0
    encode_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RenderedClip:
    """One job's frames, or why there are none.

    frames: uint8 (num_frames, height * 3 // 2, width), planar I420, BT.709, limited range,
    cropped and trimmed to exactly what the job asked for.
    """

    job_id: str
    frames: npt.NDArray[np.uint8] | None
    error: JobError | None = None


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """clips: one for each job of the batch, in its order, padding left out.

    steps_computed: forwards of the transformer, a guided step's two counted apart; steps_skipped: those that
    the reference has and an approximation left out.
    """

    clips: tuple[RenderedClip, ...]
    times: StageTimes
    peak_memory_bytes: int
    steps_computed: int = 0
    steps_skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """step_s: median seconds of one denoising step of a whole batch, warmed up. peak_memory_bytes: of it."""

    step_s: float
    peak_memory_bytes: int


class Renderer(Protocol):
    """What a worker drives. Raises OutOfDeviceMemory when the batch does not fit."""

    gpu_name: str

    def encode(self, bucket: Bucket, texts: Sequence[str]) -> None:
        """Prompts of coming batches of the bucket's model, to be at hand when those are rendered."""

    def render(self, batch: Batch) -> Rendering: ...


class Prober(Protocol):
    """What a probe's worker drives. Raises OutOfDeviceMemory when so many clips do not fit."""

    gpu_name: str

    def probe(self, bucket: Bucket, *, size: int) -> StepTimes: ...
