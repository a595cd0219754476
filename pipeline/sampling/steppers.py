"""Samplers: from the velocity at one noise level to the latents at the next.

Shapes: B clips, C latent channels, T latent frames, H and W latent sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler


class Stepper:
    """A diffusers scheduler for one batch: it keeps a history, so it must not be shared.

    config: of the checkpoint's scheduler, with its `_class_name`. flow_shift: the job's, in place of the
    checkpoint's. One history for all steps: with two experts it crosses from the first to the second.
    """

    def __init__(self, config: Mapping[str, Any], *, flow_shift: float, steps: int, device: str) -> None:
        self._scheduler = _scheduler(config, flow_shift)
        self._scheduler.set_timesteps(steps, device=device)
        self._scheduler.set_begin_index(0)

    @property
    def timesteps(self) -> torch.Tensor:
        """Falling, one for each step, on the device."""
        return self._scheduler.timesteps

    def step(
        self, velocity_BCTHW: torch.Tensor, *, timestep: torch.Tensor, latents_BCTHW: torch.Tensor
    ) -> torch.Tensor:
        """The latents at the next noise level, in their dtype."""
        return self._scheduler.step(velocity_BCTHW, timestep, latents_BCTHW, return_dict=False)[0]


def _scheduler(config: Mapping[str, Any], flow_shift: float) -> Any:
    if config["_class_name"] == "UniPCMultistepScheduler":
        return UniPCMultistepScheduler.from_config(config, flow_shift=flow_shift)
    assert config["_class_name"] == "FlowMatchEulerDiscreteScheduler", config["_class_name"]
    return FlowMatchEulerDiscreteScheduler.from_config(config, shift=flow_shift)
