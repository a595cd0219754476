"""Which steps are guided, and where what guidance added before serves again."""

from __future__ import annotations

import torch

from pipeline.approx.guidance import is_guided, reuses_difference
from pipeline.sampling.schedules import Step, make_schedule


def step(index: int, *, noise_level: float = 0.5, guidance_scale: float = 3.0) -> Step:
    return Step(
        index=index,
        timestep=torch.tensor(1000 * noise_level),
        noise_level=noise_level,
        expert=0,
        guidance_scale=guidance_scale,
    )


def test_steps_of_much_and_of_little_noise_are_outside_the_interval() -> None:
    levels = (1.0, 0.9, 0.5, 0.2, 0.1)
    guided = [is_guided(step(0, noise_level=level), interval=(0.9, 0.2)) for level in levels]
    assert guided == [False, True, True, True, False]
    assert all(is_guided(step(0, noise_level=level), interval=None) for level in levels)


def test_an_interval_guides_no_step_that_was_not_guided() -> None:
    assert not is_guided(step(0, guidance_scale=1.0), interval=(1.0, 0.0))
    assert not is_guided(step(0, guidance_scale=1.0), interval=None)


def test_from_a_fraction_on_a_difference_serves_the_step_after_its_own() -> None:
    def reuses(index: int, kept_from: int) -> bool:
        return reuses_difference(step(index), reuse_from=0.3, num_steps=20, kept_from=kept_from)

    assert not reuses(5, 4)
    assert reuses(6, 5)
    assert not reuses(7, 5)
    assert reuses(19, 18)


def test_how_long_a_difference_serves_is_a_share_of_the_schedule() -> None:
    for num_steps, served in ((10, 0), (19, 0), (20, 1), (50, 2), (60, 3)):
        ages = [
            age
            for age in range(1, 6)
            if reuses_difference(step(8 + age), reuse_from=0.1, num_steps=num_steps, kept_from=8)
        ]
        assert ages == list(range(1, served + 1)), num_steps


def test_without_a_fraction_every_difference_is_computed() -> None:
    assert not reuses_difference(step(19), reuse_from=None, num_steps=20, kept_from=18)


def test_a_noise_level_is_its_timesteps_share_of_those_that_were_trained() -> None:
    steps = make_schedule(
        torch.tensor([500, 250, 5]),
        boundary_timestep=None,
        guidance_scale=3.0,
        guidance_scale_2=None,
        num_train_timesteps=500,
    )
    assert [step.noise_level for step in steps] == [1.0, 0.5, 0.01]
