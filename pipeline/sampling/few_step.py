"""Samplers of few-step recipes; see samplers.Sampler.

Shapes: B clips, C latent channels, T latent frames, H and W latent sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import torch

from pipeline.sampling.noise import initial_noise


class EulerSteps:
    """Along the velocity from one noise level to the next, at last to none. sigmas: falling, above 0."""

    def __init__(self, sigmas: Sequence[float], *, device: str, num_train_timesteps: int = 1000) -> None:
        self._sigmas = (*sigmas, 0.0)
        self.timesteps = torch.tensor(sigmas, dtype=torch.float32, device=device) * num_train_timesteps

    def step(self, velocity_BCTHW: torch.Tensor, *, index: int, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        width = self._sigmas[index + 1] - self._sigmas[index]
        return latents_BCTHW + width * velocity_BCTHW.to(latents_BCTHW.dtype)


class RenoisingSteps:
    """To the clean latents, then back to the next noise level with fresh noise.

    Yin et al. 2024 (distribution matching distillation, second version), as its students for video are
    sampled. The noise of a step comes from the job's seed and the step alone, so it depends neither on the
    batch nor on the device. seeds: of each slot.
    """

    def __init__(
        self, sigmas: Sequence[float], *, seeds: Sequence[int], device: str, num_train_timesteps: int = 1000
    ) -> None:
        self._sigmas = (*sigmas, 0.0)
        self._seeds = seeds
        self.timesteps = torch.tensor(sigmas, dtype=torch.float32, device=device) * num_train_timesteps

    def step(self, velocity_BCTHW: torch.Tensor, *, index: int, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        sigma, following = self._sigmas[index : index + 2]
        clean_BCTHW = latents_BCTHW - sigma * velocity_BCTHW.to(latents_BCTHW.dtype)
        if following == 0:
            return clean_BCTHW
        # Drawn while a card is still at work on the velocity.
        seeds = [step_seed(seed, index) for seed in self._seeds]
        channels, frames, height, width = latents_BCTHW.shape[1:]
        noise_BCTHW = initial_noise(seeds, shape_CTHW=(channels, frames, height, width))
        return (1 - following) * clean_BCTHW + following * noise_BCTHW.to(clean_BCTHW)


def step_seed(seed: int, index: int) -> int:
    """63 bits for the noise that a step adds. Equal for equal (seed, step), unrelated otherwise."""
    digest = sha256(f"{seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
