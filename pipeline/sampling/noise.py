"""Initial noise: from each job's own seed on the CPU, so the same in any batch and on any device.

Shapes: C latent channels, T latent frames, H and W latent sides.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def initial_noise(seeds: Iterable[int], *, shape_CTHW: tuple[int, int, int, int]) -> torch.Tensor:
    """Standard normal fp32 noise (B, C, T, H, W), one clip for each seed of 0 to 2^63-1.

    A clip's noise is what a diffusers pipeline draws for it alone from a CPU generator with that seed. That
    generator reads the lower 32 bits only: seeds that differ by a multiple of 2^32 give the same noise.
    """
    return torch.cat([_clip_noise(seed, shape_CTHW) for seed in seeds])


def _clip_noise(seed: int, shape_CTHW: tuple[int, int, int, int]) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((1, *shape_CTHW), generator=generator, dtype=torch.float32)
