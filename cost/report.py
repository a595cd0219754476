"""The cost report: the ledger's tables x prices. What counts where is said in cost.tally."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from zoneinfo import ZoneInfo

import pyarrow as pa

from cost.margin import NS_PER_S, Economics, GpuCost, costs_usd, economics
from cost.prices import Prices
from cost.tally import SHARED, Durations, LedgerTables, Tally
from manifests.errors import UsageError
from manifests.wording import counted


@dataclass(frozen=True, kw_only=True)
class Line:
    """One group, or the total. cost, value_usd: None without a price.

    as_paid: all GPU time, idle time included. full_load: idle time left out. at_utilization: the full
    load divided by the utilization in the prices; None without one.
    """

    tally: Tally
    cost: GpuCost | None
    value_usd: Decimal | None
    as_paid: Economics
    full_load: Economics
    at_utilization: Economics | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """groups: empty without `by`; otherwise they add up to the total. notes: what is missing and why."""

    prices: Prices
    by: str | None
    since: datetime | None
    until: datetime | None
    tz: ZoneInfo
    total: Line
    groups: tuple[Line, ...]
    durations: tuple[Durations, ...]
    notes: tuple[str, ...]


def build_report(
    tables: Mapping[str, pa.Table],
    *,
    prices: Prices,
    by: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    tz: ZoneInfo,
) -> Report:
    """tables: the ledger's runs, jobs, batches, attempts and clips, whole. by: `bucket`, `model`,
    `preset`, `day`, `run` or a tag. since <= instant < until, both aware. tz decides only which day an
    instant is in. UsageError: a tag no job has, an empty window."""
    if since is not None and until is not None and since >= until:
        raise UsageError(
            f"--since is not before --until: {since.isoformat()} and {until.isoformat()}",
            hint="--until is the first instant left out: 2026-11-01 to 2026-11-02 is one day",
        )
    with LedgerTables(tables, since=since, until=until, tz=tz) as ledger:
        total = ledger.total()
        groups = ledger.groups(by) if by else []
        durations = ledger.durations()
    return Report(
        prices=prices,
        by=by,
        since=since,
        until=until,
        tz=tz,
        total=_lines([total], prices)[0],
        groups=tuple(_lines(groups, prices)),
        durations=tuple(durations),
        notes=tuple(_notes(total, groups, prices)),
    )


def _lines(tallies: Sequence[Tally], prices: Prices) -> list[Line]:
    costs: Sequence[GpuCost | None] = [None] * len(tallies)
    if prices.gpu_per_hour is not None:
        costs = costs_usd([tally.time for tally in tallies], gpu_per_hour=prices.gpu_per_hour)
    return [_line(tally, cost, prices) for tally, cost in zip(tallies, costs, strict=True)]


def _line(tally: Tally, cost: GpuCost | None, prices: Prices) -> Line:
    value_usd = _value_usd(tally, prices)

    def on(gpu_ns: int, cost_usd: Decimal | None, utilization: Decimal = Decimal(1)) -> Economics:
        return economics(
            gpu_ns,
            num_videos=tally.num_videos,
            clip_ns=tally.clip_ns,
            cost_usd=cost_usd,
            value_usd=value_usd,
            utilization=utilization,
        )

    busy_ns, busy_usd = tally.time.busy_ns, cost.busy_usd if cost else None
    return Line(
        tally=tally,
        cost=cost,
        value_usd=value_usd,
        as_paid=on(tally.time.total_ns, cost.total_usd if cost else None),
        full_load=on(busy_ns, busy_usd),
        at_utilization=on(busy_ns, busy_usd, prices.utilization) if prices.utilization else None,
    )


def _value_usd(tally: Tally, prices: Prices) -> Decimal | None:
    """Job prices first, then the price of a video or of a second; None where no price is known."""
    if prices.per_video is not None:
        return tally.priced_usd + prices.per_video * tally.num_unpriced
    if prices.per_second is not None:
        return tally.priced_usd + prices.per_second * tally.unpriced_ns / NS_PER_S
    return tally.priced_usd if tally.num_videos > tally.num_unpriced else None


def _notes(total: Tally, groups: Sequence[Tally], prices: Prices) -> list[str]:
    notes = []
    if prices.gpu_per_hour is None:
        notes.append("costs are n/a: `--gpu-price` (USD per GPU-hour) gives them")
    if total.num_unpriced and prices.per_video is None and prices.per_second is None:
        notes.append(
            f"{total.num_unpriced} of {counted(total.num_videos, 'video')} without a price earn nothing here:"
            " `--price-per-video` or `--price-per-second` gives them one"
        )
    if any(group.name == SHARED for group in groups):
        notes.append(f"{SHARED} is GPU time that belongs to no single group")
    return notes
