"""The nouns that cross rooms: Job, Bucket, Batch. No heavy import here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from hashlib import sha256
from typing import NamedTuple

from manifests.presets import TURBO
from manifests.wording import counted


class Weights(NamedTuple):
    """What a job asks for to be rendered with: a model and LoRAs as written; few_step: by preset `turbo`,
    which takes the few-step LoRA that a model comes with where the job names none."""

    model: str
    lora: str | None = None
    few_step: bool = False

    def __str__(self) -> str:
        return self.model if self.lora is None else f"{self.model} with {self.lora}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One clip to render: a valid manifest row with every default filled in.

    width, height: pixels delivered (even). num_frames: frames delivered. fps: exact rate.
    seed: 0 to 2^63-1. model, lora: as written in the manifest or on the command line.
    guidance_scale_2: of the low-noise expert, None for models with one transformer.
    crf, encoder_preset: libx264 settings; part of what was asked for, so of the fingerprint.
    """

    id: str
    fingerprint: str
    prompt: str
    negative_prompt: str
    width: int
    height: int
    num_frames: int
    fps: Fraction
    seed: int
    steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    flow_shift: float
    preset: str
    model: str
    crf: int
    encoder_preset: str
    lora: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Bucket:
    """What jobs must share to sit in one batch.

    width, height, num_frames: as rendered (the model's next valid ones), not as delivered.
    conditioning: "text". revision: of the model's weights and LoRAs together.
    """

    model: str
    revision: str
    preset: str
    width: int
    height: int
    num_frames: int
    steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    flow_shift: float
    conditioning: str = "text"
    lora: str | None = None

    @property
    def key(self) -> str:
        """Twelve hex digits that name this bucket in the ledger."""
        names = [field.name for field in fields(self) if field.name != "lora" or self.lora is not None]
        values = "\x1f".join(repr(getattr(self, name)) for name in names)
        return sha256(values.encode()).hexdigest()[:12]

    @property
    def weights(self) -> Weights:
        return Weights(self.model, self.lora, self.preset == TURBO)

    @property
    def is_guided(self) -> bool:
        """Whether negative prompts count: the first scale decides for both experts, as in diffusers."""
        return self.guidance_scale > 1.0

    @property
    def label(self) -> str:
        """For people: size, frames and steps."""
        return f"{self.width}x{self.height}x{self.num_frames} {counted(self.steps, 'step')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A static group of jobs of one bucket.

    number: position in the plan, from 0. size: the static batch size, at least len(jobs);
    the slots past len(jobs) are padding. cap: the bucket's cap.
    """

    number: int
    bucket: Bucket
    jobs: tuple[Job, ...]
    size: int
    cap: int
