"""What the ledger's tables say of one window of time, by group: GPU time, attempts, videos.

What counts where, so that neighbouring windows, and the groups of any grouping, add up to the whole:
a try at a batch (its attempts, padding and loading) counts at the instant it started, the idle time of a
run at the run's start, a video at its first delivery. A window is since <= instant < until.

The time of a try is shared equally by the slots of its batch: its jobs take the first slots, padding the
rest. Slot k of n gets floor(T (k + 1) / n) - floor(T k / n) of T nanoseconds, so the slots add up exactly.
Idle is what a run held beyond its tries and loads; a run whose last heartbeat is older than its last try
held at least what its tries took, so idle is never negative.

Padding and loading belong to their bucket, model, preset, run and day. What belongs to no single group (idle
time by bucket, model or preset; idle time, padding and loading by tag) is a group of its own, called SHARED.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from difflib import get_close_matches
from typing import Any
from zoneinfo import ZoneInfo

import duckdb
import pyarrow as pa

from cost import queries
from cost.margin import GpuTime
from manifests.errors import UsageError

TABLES = ("runs", "jobs", "batches", "attempts", "clips")
SHARED = "(shared)"
UNTAGGED = "(none)"


@dataclass(frozen=True, kw_only=True)
class Tally:
    """One group. num_attempts = num_delivered + num_failed + num_lost.

    num_videos: fingerprints delivered for the first time. num_rendered_again: further clips of delivered
    fingerprints, which earn nothing. num_undelivered: fingerprints tried here last and never delivered.
    clip_ns: length of the videos, nanoseconds. priced_usd: what the videos whose jobs have a price earn;
    num_unpriced, unpriced_ns: the other videos.
    """

    name: str = ""
    time: GpuTime = field(default_factory=GpuTime)
    num_attempts: int = 0
    num_delivered: int = 0
    num_failed: int = 0
    num_lost: int = 0
    num_videos: int = 0
    num_rendered_again: int = 0
    num_undelivered: int = 0
    clip_ns: int = 0
    priced_usd: Decimal = Decimal(0)
    num_unpriced: int = 0
    unpriced_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Durations:
    """GPU seconds of the delivered clips of one bucket: each a measured clip's own (nearest rank: the
    smallest that at least so many percent of the clips do not exceed)."""

    bucket: str
    num_clips: int
    p50_s: float
    p95_s: float
    p99_s: float


class LedgerTables:
    """The ledger's tables in memory, seen through one window of time; close it, or use it in a `with`.

    tables: TABLES as Arrow tables, with the columns of storage.migrations. Days are those of tz.
    """

    def __init__(
        self,
        tables: Mapping[str, pa.Table],
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        tz: ZoneInfo,
    ) -> None:
        # duckdb has no useful types: a connection is Any.
        self._connection: Any = duckdb.connect()
        for name in TABLES:
            self._connection.register(name, tables[name])
        self._connection.execute(
            f"SET VARIABLE since_us = {_epoch_us(since) if since else -(2**62)};"
            f"SET VARIABLE until_us = {_epoch_us(until) if until else 2**62};"
        )
        self._connection.execute(queries.MACROS)
        self._add_days(tz)
        self._connection.execute(queries.DERIVED)

    def __enter__(self) -> LedgerTables:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def total(self) -> Tally:
        return next(iter(self._tallies(_Grouping(attempt="''", batch="''", run="''", clip="''"))), Tally())

    def groups(self, by: str) -> list[Tally]:
        """by: `bucket`, `model`, `preset`, `day`, `run`, or else the name of a tag. Days and runs in their
        order, other groups by GPU time, the largest first; UNTAGGED and SHARED last. UsageError when no job
        has such a tag."""
        if by not in _GROUPINGS:
            self._add_tag(by)
        groups = self._tallies(_GROUPINGS.get(by, _BY_TAG))
        if by not in ("day", "run"):
            groups.sort(key=lambda group: group.time.total_ns, reverse=True)
        return sorted(groups, key=lambda group: _LAST.get(group.name, 0))

    def durations(self) -> list[Durations]:
        """One for each bucket that delivered, the most clips first."""
        rows = self._connection.execute(queries.DURATIONS).fetchall()
        return [
            Durations(bucket=bucket, num_clips=num_clips, p50_s=p50, p95_s=p95, p99_s=p99)
            for bucket, num_clips, p50, p95, p99 in rows
        ]

    def _add_days(self, tz: ZoneInfo) -> None:
        """The local date of every quarter of an hour in which anything happened."""
        quarters = [quarter for (quarter,) in self._connection.execute(queries.QUARTERS).fetchall()]
        instants = (_EPOCH + quarter * timedelta(minutes=15) for quarter in quarters)
        days = [instant.astimezone(tz).date().isoformat() for instant in instants]
        table = pa.table({"quarter": pa.array(quarters, pa.int64()), "day": pa.array(days, pa.string())})
        self._connection.register("days", table)

    def _add_tag(self, tag: str) -> None:
        known = [name for (name,) in self._connection.execute(queries.TAGS).fetchall()]
        if tag not in known and self._connection.execute("SELECT 1 FROM jobs LIMIT 1").fetchone():
            choices = [*_GROUPINGS, *known]
            near = get_close_matches(tag, choices, n=1)
            hint = f"did you mean {near[0]}?" if near else f"give one of: {', '.join(choices)}"
            raise UsageError(f"--by is neither a grouping nor a tag of any job: {tag!r}", hint=hint)
        self._connection.execute(queries.SET_TAG, [tag])

    def _tallies(self, grouping: _Grouping) -> list[Tally]:
        query = queries.TALLIES.format(
            attempt=grouping.attempt,
            batch=grouping.batch,
            run=grouping.run,
            clip=grouping.clip,
            shared=SHARED,
            sums=", ".join(f"coalesce(sum({name}), 0) AS {name}" for name in _SUMMED),
        )
        tallies = [_tally(*row) for row in self._connection.execute(query).fetchall()]
        return [tally for tally in tallies if tally != Tally(name=tally.name)]


@dataclass(frozen=True, kw_only=True)
class _Grouping:
    """The SQL that names the group of an attempt, a try at a batch, a run's idle time, a clip."""

    attempt: str
    batch: str
    run: str
    clip: str


def _everywhere(column: str, *, run: str = "NULL") -> _Grouping:
    return _Grouping(attempt=column, batch=column, run=run, clip=column)


_GROUPINGS = {
    "bucket": _everywhere("bucket"),
    "model": _everywhere("model"),
    "preset": _everywhere("preset"),
    "day": _everywhere("day", run="day"),
    "run": _everywhere("run_id", run="run_id"),
}
_TAG = f"coalesce(tag, '{UNTAGGED}')"
_BY_TAG = _Grouping(attempt=_TAG, batch="NULL", run="NULL", clip=_TAG)
_LAST = {UNTAGGED: 1, SHARED: 2}


_TIME_PARTS = [part.name for part in fields(GpuTime)]
_SUMMED = [*_TIME_PARTS, *(sum_.name for sum_ in fields(Tally) if sum_.name not in ("name", "time"))]


def _tally(name: str, *sums: Any) -> Tally:
    by_name = dict(zip(_SUMMED, sums, strict=True))
    time = GpuTime(**{part: by_name.pop(part) for part in _TIME_PARTS})
    return Tally(name=name, time=time, **by_name)


def _epoch_us(instant: datetime) -> int:
    return (instant - _EPOCH) // timedelta(microseconds=1)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
