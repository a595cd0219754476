"""Which steps are left out, and what stands in their place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.approx.step_cache import SkipByChange, SkipEvenly, Skipping, StepCache

SHAPE = (1, 2, 1, 2, 3)


def full(*values: float) -> torch.Tensor:
    """A batch of constant clips."""
    return torch.stack([torch.full(SHAPE[1:], value) for value in values])


def cached(skipping: Skipping, *, num_steps: int = 20, last_index: int | None = None) -> StepCache:
    last_index = num_steps - 1 if last_index is None else last_index
    return StepCache(skipping, num_steps=num_steps, last_index=last_index)


def skipped_indices(
    cache: StepCache, *, num_steps: int = 20, first_index: int = 0, speeds: tuple[float, ...] = (1.0,)
) -> list[int]:
    """Latents move by each clip's speed a step; the velocity is 10 more than they are."""
    skipped = []
    for index in range(first_index, num_steps):
        latents = full(*(speed * index for speed in speeds))
        if cache.velocity(latents, index=index) is None:
            cache.computed(latents, latents + 10)
        else:
            skipped.append(index)
    return skipped


def test_the_first_fifth_and_the_last_step_are_always_computed() -> None:
    cache = cached(SkipByChange(limit=math.inf))
    assert skipped_indices(cache) == list(range(4, 19))


def test_a_fifth_is_rounded_to_the_nearest_step() -> None:
    cache = cached(SkipByChange(limit=math.inf), num_steps=14)
    assert skipped_indices(cache, num_steps=14) == list(range(3, 13))


def test_short_schedules_keep_their_first_two_steps() -> None:
    cache = cached(SkipByChange(limit=math.inf), num_steps=4)
    assert skipped_indices(cache, num_steps=4) == [2]


def test_an_expert_that_begins_late_learns_from_its_own_first_two_steps() -> None:
    cache = cached(SkipByChange(limit=math.inf), last_index=19)
    assert skipped_indices(cache, first_index=10) == list(range(12, 19))


def test_an_expert_s_first_two_steps_are_computed_whatever_the_rule_says() -> None:
    class Always:
        def computed(self, latents_BCTHW: torch.Tensor, velocity_BCTHW: torch.Tensor) -> None:
            pass

        def may_skip(self, latents_BCTHW: torch.Tensor, *, index: int) -> bool:
            return True

    assert skipped_indices(cached(Always()), first_index=10) == list(range(12, 19))


def test_under_a_limit_of_zero_every_step_is_computed() -> None:
    assert skipped_indices(cached(SkipByChange(limit=0.0))) == []


def test_the_predicted_change_adds_up_until_the_limit_and_then_starts_anew() -> None:
    # Velocity and latents move alike, a rate of 1. After step 3, whose velocity is 13, four steps of 1/13
    # stay under 0.33 and step 8 is computed; after that five of 1/18, and after step 14 the rest.
    skipped = skipped_indices(cached(SkipByChange(limit=0.33)))
    assert skipped == [*range(4, 8), *range(9, 14), *range(15, 19)]


def test_the_rate_is_that_of_the_last_two_computed_steps() -> None:
    skipping = SkipByChange(limit=0.25)
    for latents, velocity in ((0.0, 10.0), (1.0, 10.0), (3.0, 20.0)):  # rates 0, then 10 for 2
        skipping.computed(full(latents), full(velocity))
    assert skipping.may_skip(full(3.5), index=5)  # 5 * 0.5 / 20
    assert not skipping.may_skip(full(3.0), index=6)  # the same way back: changes count, not where they lead


def test_a_velocity_that_is_not_computed_keeps_its_offset_from_the_latents() -> None:
    cache = cached(SkipByChange(limit=math.inf))
    generator = torch.Generator().manual_seed(1)
    pairs = [torch.randn(2, *SHAPE, generator=generator) for _ in range(4)]
    for index, (latents, velocity) in enumerate(pairs):
        assert cache.velocity(latents, index=index) is None
        cache.computed(latents, velocity)
    last_latents, last_velocity = pairs[-1]
    later = torch.randn(SHAPE, generator=generator)
    torch.testing.assert_close(
        cache.velocity(later, index=4), last_velocity + later - last_latents, rtol=0, atol=1e-6
    )


def test_a_batch_leaves_out_only_what_each_of_its_clips_would() -> None:
    slow, fast = (skipped_indices(cached(SkipByChange(limit=0.33)), speeds=(speed,)) for speed in (1.0, 3.0))
    both = skipped_indices(cached(SkipByChange(limit=0.33)), speeds=(1.0, 3.0))
    assert len(fast) < len(slow)
    assert both == fast


def test_copies_of_a_clip_do_not_change_what_it_leaves_out() -> None:
    alone = skipped_indices(cached(SkipByChange(limit=0.2)), speeds=(2.0,))
    padded = skipped_indices(cached(SkipByChange(limit=0.2)), speeds=(2.0, 2.0, 2.0))
    assert alone == padded
    assert 0 < len(alone) < 15


def test_a_clip_that_is_not_finite_is_computed_to_its_end() -> None:
    assert skipped_indices(cached(SkipByChange(limit=math.inf)), speeds=(1.0, math.nan)) == []


@pytest.mark.parametrize("num_steps", [20, 40, 50])
@pytest.mark.parametrize("skipped_frac", [0.0, 0.25, 0.5, 0.6])
def test_a_given_share_of_the_schedule_is_left_out_evenly(num_steps: int, skipped_frac: float) -> None:
    cache = cached(
        SkipEvenly(SkipByChange(limit=0.0), skipped_frac=skipped_frac, num_steps=num_steps),
        num_steps=num_steps,
    )
    skipped = skipped_indices(cache, num_steps=num_steps)
    assert len(skipped) == round(skipped_frac * num_steps)
    first, last = num_steps // 5, num_steps - 1
    for start in range(first, last - 4):  # any five steps have their share, give or take one
        expected = 5 * len(skipped) / (last - first)
        assert abs(sum(start <= index < start + 5 for index in skipped) - expected) <= 1


class Waits(TorchDispatchMode):
    """Counts values that travel from the device to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("evenly", [False, True])
def test_a_step_that_is_asked_about_waits_for_the_device_once(evenly: bool) -> None:
    by_change = SkipByChange(limit=0.33)
    skipping = SkipEvenly(by_change, skipped_frac=0.5, num_steps=20) if evenly else by_change
    with Waits() as waits:
        skipped_indices(cached(skipping), speeds=(1.0, 2.0))
    assert waits.count == 20 - 4 - 1  # neither the first fifth nor the last
