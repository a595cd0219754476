"""What an engine asks of a family of models; one adapter for each family implements it.

Shapes: B clips, C latent channels, T latent frames, H and W latent sides, L text tokens,
E channels of the text encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch


class Denoiser(Protocol):
    """A model with all that does not change from step to step computed once."""

    def __call__(self, latents_BCTHW: torch.Tensor, *, index: int, guidance_scale: float) -> torch.Tensor:
        """The guided velocity in fp32, of the latents' shape. index: of one of the denoiser's own steps."""


class VideoModel(Protocol):
    """A loaded model on its device. scheduler_config: of the sampler it was published with.

    boundary_timestep: below it the second expert takes over; None for models with one.
    """

    scheduler_config: Mapping[str, Any]
    boundary_timestep: float | None

    def encode(self, prompts: Sequence[str]) -> list[torch.Tensor]:
        """Each prompt's own tokens, unpadded (L, E), on the CPU: independent of every other prompt."""

    def latent_shape(self, *, width: int, height: int, num_frames: int) -> tuple[int, int, int, int]:
        """(C, T, H, W) of a clip of that size in pixels and frames, which the model must allow."""

    def denoiser(
        self,
        prompts: Sequence[torch.Tensor],
        negatives: Sequence[torch.Tensor],
        *,
        timesteps: torch.Tensor,
        expert: int,
    ) -> Denoiser:
        """One expert made ready for a batch's encoded prompts and its own steps of the schedule, (S,).

        negatives: none where nothing is guided. The denoiser is used before another one is asked for.
        """

    def decode(self, latents_1CTHW: torch.Tensor) -> Iterator[torch.Tensor]:
        """One clip's fp32 RGB in [0, 1], (3, frames, height, width), piece by piece; one clip at a time."""
