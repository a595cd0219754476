"""Samplers: from the velocity at one noise level to the latents at the next.

Shapes: B clips, C latent channels, T latent frames, H and W latent sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from pipeline.sampling.levels import EULER, NoiseLevels, noise_levels, sampler_settings
from pipeline.sampling.unipc import Update, unipc_updates


class Stepper:
    """Takes one batch from noise to clean latents. It keeps a history, so it must not be shared.

    config: of the checkpoint's scheduler, with its `_class_name`. flow_shift: the job's, in place of the
    checkpoint's. One history for all steps: with two experts it crosses from the first to the second.
    timesteps: falling, one for each step, on the device; whole numbers for UniPC, fp32 for Euler.
    Raises ModelError for a sampler that is not Wan's, RenderError for a shift that no sampler can follow.

    All weights are Python numbers before the first step, so that a step never waits for the device.
    """

    def __init__(self, config: Mapping[str, Any], *, flow_shift: float, steps: int, device: str) -> None:
        settings = sampler_settings(config)
        levels = noise_levels(settings, flow_shift=flow_shift, steps=steps)
        self._updates = _updates(settings, levels)
        memory = max(len(update.earlier_weights) for update in self._updates)
        self._earlier: deque[torch.Tensor] = deque(maxlen=memory)
        self._num_taken = 0
        self.timesteps = torch.from_numpy(levels.timesteps).to(device)

    def step(self, velocity_BCTHW: torch.Tensor, *, index: int, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """The latents at the next noise level, new, in their dtype; any shape will do.

        index: of the step, each taken once and in order. latents_BCTHW: what the step before gave.
        """
        assert index == self._num_taken, (index, self._num_taken)
        self._num_taken += 1
        update = self._updates[index]
        velocity_BCTHW = velocity_BCTHW.to(latents_BCTHW.dtype)
        change_BCTHW = velocity_BCTHW * update.width
        if self._earlier.maxlen:
            clean_BCTHW = torch.sub(latents_BCTHW, velocity_BCTHW, alpha=update.sigma)
            for weight, earlier_BCTHW in zip(update.earlier_weights, self._earlier, strict=False):
                change_BCTHW.add_(earlier_BCTHW, alpha=weight)
            change_BCTHW.sub_(clean_BCTHW, alpha=sum(update.earlier_weights))
            self._earlier.appendleft(clean_BCTHW)
        return change_BCTHW.add_(latents_BCTHW)


def _updates(settings: Mapping[str, Any], levels: NoiseLevels) -> tuple[Update, ...]:
    if settings["_class_name"] == EULER:
        sigmas = levels.sigmas.tolist()
        return tuple(Update(sigma=sigma, width=following - sigma) for sigma, following in pairwise(sigmas))
    return unipc_updates(
        levels.sigmas,
        order=settings["solver_order"],
        disable_corrector=settings["disable_corrector"],
    )
