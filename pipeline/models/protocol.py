"""What an engine asks of a family of models; one adapter for each family implements it.

Shapes: B clips, C latent channels, T latent frames, H and W latent sides, L text tokens,
E channels of the text encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch


class VideoModel(Protocol):
    """A loaded model on its device. scheduler_config: of the sampler it was published with.

    boundary_timestep: below it the second expert takes over; None for models with one.
    """

    scheduler_config: Mapping[str, Any]
    boundary_timestep: float | None

    def encode(self, prompt: str) -> torch.Tensor:
        """The prompt's own tokens, unpadded (L, E): independent of every other prompt."""

    def latent_shape(self, *, width: int, height: int, num_frames: int) -> tuple[int, int, int, int]:
        """(C, T, H, W) of a clip of that size in pixels and frames, which the model must allow."""

    def text_states(self, prompts: Sequence[torch.Tensor], *, expert: int) -> Any:
        """What `velocity` needs of a batch's encoded prompts, computed once for all steps."""

    def velocity(
        self, latents_BCTHW: torch.Tensor, *, timestep: torch.Tensor, text_states: Any, expert: int
    ) -> torch.Tensor:
        """The model's prediction in fp32, of the latents' shape. timestep: a scalar."""

    def decode(self, latents_1CTHW: torch.Tensor) -> torch.Tensor:
        """One clip's fp32 RGB in [0, 1], (3, frames, height, width)."""
