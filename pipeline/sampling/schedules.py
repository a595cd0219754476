"""What happens at each step of a clip: which timestep, which expert, which guidance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pipeline.sampling.guidance import uses_guidance


@dataclass(frozen=True, kw_only=True)
class Step:
    """index: from 0. timestep: a scalar on the device. noise_level: the same as a number, 1 for noise alone.
    expert: 0, or 1 for the low-noise one.

    guidance_scale: 1 where the negative prompt has no say, so needs no model call.
    """

    index: int
    timestep: torch.Tensor
    noise_level: float
    expert: int
    guidance_scale: float


def make_schedule(
    timesteps: torch.Tensor,
    *,
    boundary_timestep: float | None,
    guidance_scale: float,
    guidance_scale_2: float | None,
    num_train_timesteps: int = 1000,
) -> tuple[Step, ...]:
    """One Step for each timestep. Below the boundary the second expert and its guidance take over.

    timesteps: falling, (S,). boundary_timestep: None for models with one transformer.
    """
    scales = (guidance_scale, guidance_scale if guidance_scale_2 is None else guidance_scale_2)
    guides = uses_guidance(guidance_scale)
    numbers = timesteps.tolist()
    experts = _experts(numbers, boundary_timestep)
    return tuple(
        Step(
            index=index,
            timestep=timestep,
            noise_level=number / num_train_timesteps,
            expert=expert,
            guidance_scale=scales[expert] if guides else 1.0,
        )
        for index, (timestep, number, expert) in enumerate(zip(timesteps, numbers, experts, strict=True))
    )


def _experts(timesteps: Iterable[float], boundary_timestep: float | None) -> list[int]:
    return [int(boundary_timestep is not None and timestep < boundary_timestep) for timestep in timesteps]
