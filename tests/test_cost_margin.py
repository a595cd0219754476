from __future__ import annotations

import random
from dataclasses import fields
from decimal import Decimal

import pytest

from cost.margin import NS_PER_S, Economics, GpuCost, GpuTime, costs_usd, economics, gpu_usd, shares_usd

PARTS = ("useful", "wasted", "load", "padding", "idle")


def test_forty_seconds_at_three_sixty_cost_four_cents() -> None:
    assert gpu_usd(40.0, gpu_per_hour=Decimal("3.60")) == Decimal("0.04")


def test_each_of_four_equal_shares_costs_a_quarter() -> None:
    shares = shares_usd([10 * NS_PER_S] * 4, gpu_per_hour=Decimal("3.60"))
    assert shares == [Decimal("0.01")] * 4


def test_free_gpu_costs_zero_without_a_sign() -> None:
    (cost,) = costs_usd([GpuTime(useful_ns=5)], gpu_per_hour=Decimal(0))
    assert all(str(getattr(cost, field.name)) in ("0", "0E-12") for field in fields(GpuCost))


def test_shares_add_up_exactly_and_none_is_negative() -> None:
    rng = random.Random(1)
    for _ in range(200):
        price = Decimal(rng.randrange(1, 10**7)).scaleb(-rng.randrange(7))
        times_ns = [rng.choice([0, 1, 7, rng.randrange(10**13)]) for _ in range(rng.randrange(1, 9))]
        shares = shares_usd(times_ns, gpu_per_hour=price)
        (whole,) = shares_usd([sum(times_ns)], gpu_per_hour=price)
        assert sum(shares) == whole
        assert min(shares) >= 0
        for share, time_ns in zip(shares, times_ns, strict=True):
            assert abs(share - time_ns * price / (3600 * NS_PER_S)) <= Decimal("1e-12")


def test_parts_and_groups_of_costs_add_up_both_ways() -> None:
    rng = random.Random(2)
    for _ in range(100):
        times = [GpuTime(**{f"{part}_ns": rng.randrange(10**12) for part in PARTS}) for _ in range(5)]
        total = GpuTime(**{f"{part}_ns": sum(getattr(t, f"{part}_ns") for t in times) for part in PARTS})
        price = Decimal(rng.randrange(10**6)).scaleb(-4)
        costs = costs_usd(times, gpu_per_hour=price)
        (whole,) = costs_usd([total], gpu_per_hour=price)
        assert sum(cost.total_usd for cost in costs) == whole.total_usd
        for part in PARTS:
            assert sum(getattr(cost, f"{part}_usd") for cost in costs) == getattr(whole, f"{part}_usd")


def test_busy_is_all_but_idle() -> None:
    time = GpuTime(useful_ns=1, wasted_ns=2, load_ns=4, padding_ns=8, idle_ns=16)
    assert (time.total_ns, time.busy_ns) == (31, 15)


def test_margin_by_hand() -> None:
    # 10 videos of 5 s in 1000 GPU-seconds: $1.00 of GPU time that earns $4.00.
    numbers = {"num_videos": 10, "clip_ns": 50 * NS_PER_S, "cost_usd": Decimal(1), "value_usd": Decimal(4)}
    assert economics(1000 * NS_PER_S, **numbers) == Economics(
        gpu_s_per_video=Decimal(100),
        videos_per_gpu_hour=Decimal(36),
        cost_per_video_usd=Decimal("0.1"),
        cost_per_second_usd=Decimal("0.02"),
        value_per_gpu_hour_usd=Decimal("14.4"),
        margin_frac=Decimal("0.75"),
    )
    assert economics(1000 * NS_PER_S, **numbers, utilization=Decimal("0.5")) == Economics(
        gpu_s_per_video=Decimal(200),
        videos_per_gpu_hour=Decimal(18),
        cost_per_video_usd=Decimal("0.2"),
        cost_per_second_usd=Decimal("0.04"),
        value_per_gpu_hour_usd=Decimal("7.2"),
        margin_frac=Decimal("0.5"),
    )


@pytest.mark.parametrize("utilization", ["1", "0.3", "1e-12"])
def test_nothing_to_divide_by_is_none(utilization: str) -> None:
    nothing = economics(
        0,
        num_videos=0,
        clip_ns=0,
        cost_usd=Decimal(0),
        value_usd=Decimal(0),
        utilization=Decimal(utilization),
    )
    assert all(getattr(nothing, field.name) is None for field in fields(Economics))


def test_loss_is_a_negative_margin_and_break_even_is_plain_zero() -> None:
    def margin(value: str) -> Decimal | None:
        return economics(
            1, num_videos=1, clip_ns=1, cost_usd=Decimal(2), value_usd=Decimal(value)
        ).margin_frac

    assert margin("1") == -1
    assert margin("2") == 0
    nearly = margin("1.99999999999999999999")
    assert nearly is not None
    assert not nearly.is_signed()
