"""From a denoiser to the velocity of each step of a batch.

Shapes: B clips, C latent channels, T latent frames, H and W latent sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeline.models.protocol import Denoiser, SparseAttention
from pipeline.sampling.schedules import Step

# What a step's self-attention is in place of a dense one.
SparseIn = Callable[[Step], SparseAttention | None]


@dataclass(kw_only=True)
class Forwards:
    """Of the transformer, for one batch; a guided step's two are counted apart.

    skipped: those that the reference has and that were not computed.
    """

    computed: int = 0
    skipped: int = 0


class Velocity(Protocol):
    """Of one expert, for one batch: its steps in order."""

    def __call__(self, latents_BCTHW: torch.Tensor, *, own_index: int, step: Step) -> torch.Tensor:
        """The guided velocity in fp32. own_index: among the expert's own steps."""


class VelocityOf(Protocol):
    def __call__(self, denoiser: Denoiser, *, last_index: int) -> Velocity:
        """last_index: in the schedule, of the expert's last step."""


def always_dense(step: Step) -> None:
    """A SparseIn."""


class PlainVelocity:
    """Every forward that the reference has."""

    def __init__(
        self,
        denoiser: Denoiser,
        *,
        last_index: int,
        forwards: Forwards | None = None,
        sparse_in: SparseIn = always_dense,
    ) -> None:
        self._denoiser = denoiser
        self._forwards = forwards or Forwards()
        self._sparse_in = sparse_in

    def __call__(self, latents_BCTHW: torch.Tensor, *, own_index: int, step: Step) -> torch.Tensor:
        self._forwards.computed += num_forwards(step)
        return self._denoiser(
            latents_BCTHW,
            index=own_index,
            guidance_scale=step.guidance_scale,
            sparse=self._sparse_in(step),
        )


def num_forwards(step: Step) -> int:
    """Of the reference."""
    return 1 if step.guidance_scale == 1.0 else 2
