"""What manifests must know of a model; made by pipeline, passed in by jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from manifests.job import Weights


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes, limits and defaults of one model. Needs no weights.

    name: as written. revision: commit or content hash. engine: "wan" or "generic".
    multiple: rendered width and height are multiples of this many pixels.
    temporal: rendered frame counts are temporal x k + 1.
    min_side, max_side: pixels; max_frames: rendered frames.
    patch_pixels: pixels of one token along a side (a token is patch_pixels^2 x temporal).
    resolutions: names a `resolution` column may use, as (width, height).
    two_experts: whether guidance_scale_2 means something.
    max_tokens: prompt tokens the text encoder reads; count_tokens counts without a limit.
    cap: largest batch worth running for (width, height, num_frames) as rendered.
    few_step: what weights that sample in a few steps without guidance call themselves; their default steps,
    guidance and flow shift are then the only ones. None for all others.
    """

    name: str
    revision: str
    engine: str
    multiple: int
    temporal: int
    min_side: int
    max_side: int
    max_frames: int
    patch_pixels: int
    default_width: int
    default_height: int
    default_num_frames: int
    default_fps: Fraction
    default_steps: int
    default_guidance_scale: float
    default_guidance_scale_2: float | None
    default_flow_shift: float
    default_negative_prompt: str
    resolutions: Mapping[str, tuple[int, int]]
    two_experts: bool
    max_tokens: int
    count_tokens: Callable[[Sequence[str]], Sequence[int]]
    cap: Callable[[int, int, int], int]
    few_step: str | None = None


# Finds a model, or raises ModelError.
FindSpec = Callable[[Weights], ModelSpec]
