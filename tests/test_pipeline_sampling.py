from __future__ import annotations

import pytest
import torch
from diffusers.utils.torch_utils import randn_tensor

from pipeline.sampling.guidance import guided, uses_guidance
from pipeline.sampling.noise import initial_noise
from pipeline.sampling.schedules import make_schedule

SHAPE = (4, 3, 8, 10)
SEEDS = [0, 1, 2**31, 2**53 + 1, 2**63 - 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_what_diffusers_draws_for_the_job_alone(seed: int) -> None:
    generator = torch.Generator("cpu").manual_seed(seed)
    alone = randn_tensor((1, *SHAPE), generator=generator, device=torch.device("cpu"), dtype=torch.float32)
    assert torch.equal(initial_noise([seed], shape_CTHW=SHAPE), alone)


def test_noise_does_not_depend_on_batch_or_order() -> None:
    batch = initial_noise(SEEDS, shape_CTHW=SHAPE)
    backward = initial_noise(reversed(SEEDS), shape_CTHW=SHAPE)
    assert torch.equal(batch, backward.flip(0))
    for seed, noise in zip(SEEDS, batch, strict=True):
        assert torch.equal(initial_noise([seed], shape_CTHW=SHAPE)[0], noise)


def test_neighbouring_seeds_give_unrelated_noise() -> None:
    first, second, far = initial_noise([2**63 - 1, 2**63 - 2, 7], shape_CTHW=SHAPE).flatten(1)
    correlations = torch.corrcoef(torch.stack([first, second, far])) - torch.eye(3)
    assert correlations.abs().max() < 0.15


def schedule(*, boundary: float | None, scales: tuple[float, float | None]) -> list[tuple[int, float]]:
    timesteps = torch.tensor([999, 875, 874, 10])
    steps = make_schedule(
        timesteps, boundary_timestep=boundary, guidance_scale=scales[0], guidance_scale_2=scales[1]
    )
    assert [int(step.timestep) for step in steps] == timesteps.tolist()
    return [(step.expert, step.guidance_scale) for step in steps]


def test_a_model_with_one_transformer_keeps_one_guidance() -> None:
    assert schedule(boundary=None, scales=(5.0, None)) == [(0, 5.0)] * 4


def test_below_the_boundary_the_second_expert_and_its_guidance_take_over() -> None:
    assert schedule(boundary=875.0, scales=(4.0, 3.0)) == [(0, 4.0), (0, 4.0), (1, 3.0), (1, 3.0)]


def test_without_a_second_guidance_the_first_holds_for_both_experts() -> None:
    assert schedule(boundary=875.0, scales=(4.0, None)) == [(0, 4.0), (0, 4.0), (1, 4.0), (1, 4.0)]


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0])
def test_a_first_guidance_of_at_most_one_switches_guidance_off(scale: float) -> None:
    assert not uses_guidance(scale)
    assert schedule(boundary=875.0, scales=(scale, 3.0)) == [(0, 1.0), (0, 1.0), (1, 1.0), (1, 1.0)]


def test_guidance_goes_past_the_prompt_away_from_the_negative() -> None:
    conditional, unconditional = torch.tensor([3.0, -1.0]), torch.tensor([1.0, 1.0])
    assert guided(conditional, unconditional, scale=2.0).tolist() == [5.0, -3.0]
