"""The arithmetic of cost and margin: pure, exact, nothing read from anywhere.

GPU time is held in whole nanoseconds, so its parts add up without rounding. Money is held to 1e-12 USD.
Each part of a total is rounded on its own and the total is their sum; where a part is shared between
groups, the running sum is rounded and a share is the difference of two neighbours (`shares_usd`), so the
shares add up to the part, none is negative, and each is within 1e-12 USD of its unrounded value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from fractions import Fraction
from itertools import accumulate, pairwise

NS_PER_S = 1_000_000_000
NS_PER_HOUR = 3600 * NS_PER_S
QUANTUM = Decimal("1e-12")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTime:
    """Nanoseconds of devices held, all devices together, by what they were held for.

    useful: shares of attempts that delivered. wasted: shares of attempts that failed or were retried.
    load: reading weights, compiling, encoding prompts ahead. padding: empty slots of batches. idle: held,
    no work.
    """

    useful_ns: int = 0
    wasted_ns: int = 0
    load_ns: int = 0
    padding_ns: int = 0
    idle_ns: int = 0

    @property
    def busy_ns(self) -> int:
        """All but idle: what the same work takes at full load."""
        return self.total_ns - self.idle_ns

    @property
    def total_ns(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuCost:
    """USD of each part of a GpuTime."""

    useful_usd: Decimal = Decimal(0)
    wasted_usd: Decimal = Decimal(0)
    load_usd: Decimal = Decimal(0)
    padding_usd: Decimal = Decimal(0)
    idle_usd: Decimal = Decimal(0)

    @property
    def busy_usd(self) -> Decimal:
        return self.total_usd - self.idle_usd

    @property
    def total_usd(self) -> Decimal:
        return sum((getattr(self, field.name) for field in fields(self)), Decimal(0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Economics:
    """What one video costs and earns on one basis of GPU time. None is n/a: nothing to divide by, or no
    price. margin_frac: (value - cost) / value."""

    gpu_s_per_video: Decimal | None
    videos_per_gpu_hour: Decimal | None
    cost_per_video_usd: Decimal | None
    cost_per_second_usd: Decimal | None
    value_per_gpu_hour_usd: Decimal | None
    margin_frac: Decimal | None


def nanoseconds(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def gpu_usd(device_s: float, *, gpu_per_hour: Decimal) -> Decimal:
    """USD of so many device-seconds at so many USD an hour."""
    return _usd(nanoseconds(device_s), gpu_per_hour)


def shares_usd(times_ns: Iterable[int], *, gpu_per_hour: Decimal) -> list[Decimal]:
    """USD of each of several times, adding up to the USD of their sum exactly; none is negative."""
    sums_ns = accumulate(times_ns, initial=0)
    return [after - before for before, after in pairwise(_usd(ns, gpu_per_hour) for ns in sums_ns)]


def costs_usd(times: Iterable[GpuTime], *, gpu_per_hour: Decimal) -> list[GpuCost]:
    """The cost of each group; the groups' parts add up to the parts of the cost of their sum exactly."""
    times = list(times)
    columns = {
        part: shares_usd((getattr(time, f"{part}_ns") for time in times), gpu_per_hour=gpu_per_hour)
        for part in ("useful", "wasted", "load", "padding", "idle")
    }
    return [
        GpuCost(**{f"{part}_usd": column[group] for part, column in columns.items()})
        for group in range(len(times))
    ]


def economics(
    gpu_ns: int,
    *,
    num_videos: int,
    clip_ns: int,
    cost_usd: Decimal | None,
    value_usd: Decimal | None,
    utilization: Decimal = Decimal(1),
) -> Economics:
    """gpu_ns, cost_usd: of the work at full load; both are divided by utilization, in (0, 1].
    clip_ns: seconds of finished video, in nanoseconds. value_usd: what the videos earned."""
    used = Fraction(utilization)
    paid_ns = gpu_ns / used
    paid_usd = None if cost_usd is None else Fraction(cost_usd) / used
    value = None if value_usd is None else Fraction(value_usd)
    return Economics(
        gpu_s_per_video=_ratio(paid_ns / NS_PER_S, num_videos),
        videos_per_gpu_hour=_ratio(num_videos, paid_ns / NS_PER_HOUR),
        cost_per_video_usd=_ratio(paid_usd, num_videos),
        cost_per_second_usd=_ratio(paid_usd, Fraction(clip_ns, NS_PER_S)),
        value_per_gpu_hour_usd=_ratio(value, paid_ns / NS_PER_HOUR),
        margin_frac=None if value is None or paid_usd is None else _ratio(value - paid_usd, value),
    )


def rounded(number: Fraction) -> Decimal:
    """To the quantum of money, half to even; never -0."""
    with localcontext(prec=60):
        exact = Decimal(number.numerator) / number.denominator
        return exact.quantize(QUANTUM, rounding=ROUND_HALF_EVEN) + 0


def _ratio(amount: Fraction | int | None, by: Fraction | int) -> Decimal | None:
    return None if amount is None or by == 0 else rounded(Fraction(amount) / by)


def _usd(ns: int, gpu_per_hour: Decimal) -> Decimal:
    return rounded(Fraction(gpu_per_hour) * ns / NS_PER_HOUR)
