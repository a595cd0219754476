"""Which sampler a batch takes: the checkpoint's own, or that of a few-step recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from pipeline.sampling.few_step import EulerSteps, RenoisingSteps
from pipeline.sampling.recipes import CHECKPOINT, RENOISE, Recipe
from pipeline.sampling.steppers import Stepper


class Sampler(Protocol):
    """timesteps: falling, one for each step, on the device."""

    timesteps: torch.Tensor

    def step(self, velocity_BCTHW: torch.Tensor, *, index: int, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """The latents at the next noise level, new; each step once and in order."""


def make_sampler(
    config: Mapping[str, Any],
    *,
    recipe: Recipe | None,
    flow_shift: float,
    steps: int,
    seeds: Sequence[int],
    device: str,
) -> Sampler:
    """config: of the checkpoint's scheduler. seeds: of each slot. Raises as Stepper does."""
    if recipe is None or recipe.sampler == CHECKPOINT:
        return Stepper(config, flow_shift=flow_shift, steps=steps, device=device)
    num_trained = num_train_timesteps(config)
    if recipe.sampler == RENOISE:
        return RenoisingSteps(recipe.sigmas, seeds=seeds, device=device, num_train_timesteps=num_trained)
    return EulerSteps(recipe.sigmas, device=device, num_train_timesteps=num_trained)


def boundary_timestep(
    config: Mapping[str, Any], of_checkpoint: float | None, recipe: Recipe | None
) -> float | None:
    """Below it the second expert takes over; None for models with one."""
    if of_checkpoint is None or recipe is None or recipe.expert_switch is None:
        return of_checkpoint
    return recipe.expert_switch * num_train_timesteps(config)


def num_train_timesteps(config: Mapping[str, Any]) -> int:
    return int(config.get("num_train_timesteps", 1000))
