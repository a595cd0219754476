"""What a bench is run at, and the inputs that every side is given.

Shapes: B clips, C latent channels, T latent frames, H and W latent sides, L text tokens, E channels of the
text encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from manifests.wording import counted
from pipeline.bench.weights import Weights
from pipeline.models.shapes import Shape
from pipeline.sampling.noise import initial_noise

SEED = 7
# Tokens of a prompt as people write them for video, and of the negative prompt published with Wan.
PROMPT_TOKENS = 96
NEGATIVE_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Setting:
    """device: "cpu" or "cuda:0". width, height: pixels. steps: of a clip. seconds: for each side of a stage.

    say: takes a line on what is going on.
    """

    weights: Weights
    device: str
    width: int
    height: int
    num_frames: int
    steps: int
    seconds: float
    say: Callable[[str], None]

    @property
    def shape(self) -> Shape:
        return self.weights.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of transformer and text encoder, as the engine chooses it."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @property
    def latent_shape_CTHW(self) -> tuple[int, int, int, int]:
        return self.shape.latent_shape(width=self.width, height=self.height, num_frames=self.num_frames)

    @property
    def num_tokens(self) -> int:
        _, frames, height, width = self.latent_shape_CTHW
        _, patch_height, patch_width = self.shape.transformer["patch_size"]
        return int(frames * (height // patch_height) * (width // patch_width))

    @property
    def label(self) -> str:
        return f"{self.width}x{self.height}, {counted(self.num_frames, 'frame')}, {self.num_tokens:,} tokens"


@dataclass(frozen=True, kw_only=True)
class GuidedInputs:
    """Of one guided step: fp32 latents, a scalar timestep, and each prompt's own tokens, encoded."""

    latents_1CTHW: torch.Tensor
    timestep: torch.Tensor
    prompt_LE: torch.Tensor
    negative_LE: torch.Tensor
    guidance_scale: float


def guided_inputs(setting: Setting) -> GuidedInputs:
    """The same at every call."""
    return GuidedInputs(
        latents_1CTHW=noise(setting),
        timestep=torch.tensor(757, device=setting.device),
        prompt_LE=_random_text(PROMPT_TOKENS, seed=1, setting=setting),
        negative_LE=_random_text(NEGATIVE_TOKENS, seed=2, setting=setting),
        guidance_scale=setting.shape.guidance_scale,
    )


def noise(setting: Setting) -> torch.Tensor:
    """One clip's latents, (1, C, T, H, W) in fp32."""
    return initial_noise([SEED], shape_CTHW=setting.latent_shape_CTHW).to(setting.device)


def _random_text(tokens: int, *, seed: int, setting: Setting) -> torch.Tensor:
    shape_LE = (tokens, int(setting.shape.transformer["text_dim"]))
    text_LE = torch.randn(shape_LE, generator=torch.Generator("cpu").manual_seed(seed))
    return text_LE.to(setting.device, setting.dtype)
