"""From jobs and what is already delivered to a plan. Pure and deterministic, a column at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manifests.arrays import Ints, Mask, gather
from manifests.errors import UsageError
from manifests.history import History, judge
from manifests.job import Batch, Bucket
from manifests.model_spec import FindSpec
from manifests.packing import pack
from manifests.reader import Reading
from manifests.table import job_from_row

__all__ = ["History", "Plan", "plan"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to render, in batches, and what not.

    jobs: JOBS_SCHEMA and `reason` (null: never delivered before), in the order of the batches.
    batches: packing.BATCHES_SCHEMA, row ranges of jobs. reused: JOBS_SCHEMA, `clip` (file name) and
    `reason`. exhausted: JOBS_SCHEMA and `reason`; `vgbatch retry` tries them again.
    left_out: JOBS_SCHEMA and `reason`, to be rendered but not chosen by --select or --limit.
    rejected: REJECTED_SCHEMA. cap_sources: of each bucket's cap, of packing's RULE, PROBE, OUT_OF_MEMORY.
    """

    jobs: pa.Table
    buckets: tuple[Bucket, ...]
    cap_sources: tuple[str, ...]
    batches: pa.Table
    reused: pa.Table
    exhausted: pa.Table
    left_out: pa.Table
    rejected: pa.Table
    notes: tuple[str, ...]

    def batch(self, number: int) -> Batch:
        """A batch with its jobs as objects."""
        (row,) = self.batches.slice(number, 1).to_pylist()
        jobs = self.jobs.slice(row["start"], row["stop"] - row["start"]).to_pylist()
        return Batch(
            number=number,
            bucket=self.buckets[row["bucket"]],
            jobs=tuple(job_from_row(job) for job in jobs),
            size=row["size"],
            cap=row["cap"],
        )


def plan(
    reading: Reading,
    *,
    history: History,
    model_spec: FindSpec,
    refresh: frozenset[str],
    numerics: str,
    limit: int | None,
    select: Sequence[str],
    max_attempts: int = 3,
) -> Plan:
    """Decide for every job whether its clip is reused, and pack the others.

    refresh: of `model` and `numerics`: render again where that has changed. numerics: of the engine now.
    limit: most jobs to render, the highest priority first, then the manifest's order. select: ids to
    render, all when empty; UsageError for one that the manifest does not have.
    """
    jobs = reading.jobs
    verdict = judge(jobs, history=history, refresh=refresh, numerics=numerics, max_attempts=max_attempts)
    reused = np.flatnonzero(verdict.clip >= 0)
    wanted = np.flatnonzero((verdict.clip < 0) & ~verdict.exhausted)
    chosen = _limited(jobs, wanted[_selected(reading, select)[wanted]], limit)
    packing = pack(jobs, chosen, model_spec=model_spec, probed=history.probed, caps=history.caps)
    explained = jobs.append_column("reason", pa.chunked_array([verdict.reason]))
    clips = gather(history.clips.select(["file"]), verdict.clip[reused])["file"]
    kept = gather(explained, reused)
    return Plan(
        jobs=gather(explained, packing.order),
        buckets=packing.buckets,
        cap_sources=packing.cap_sources,
        batches=packing.batches,
        reused=kept.add_column(jobs.num_columns, "clip", clips.cast(pa.string())),
        exhausted=gather(explained, np.flatnonzero(verdict.exhausted)),
        left_out=gather(explained, np.setdiff1d(wanted, chosen, assume_unique=True)),
        rejected=reading.rejected,
        notes=reading.notes,
    )


def _selected(reading: Reading, select: Sequence[str]) -> Mask:
    """Which of reading.jobs were chosen by id; all of them when none was named."""
    if not select:
        return np.ones(reading.jobs.num_rows, np.bool_)
    ids = pa.array([normalize("NFC", id) for id in select], pa.string())
    known = pa.chunked_array([*reading.jobs["id"].chunks, *reading.rejected["id"].chunks], pa.string())
    missing = ids.filter(pc.invert(pc.is_in(ids, value_set=known.combine_chunks()))).to_pylist()
    if missing:
        raise UsageError(
            f"no such id in the manifest: {', '.join(f'`{id}`' for id in missing)}",
            hint="ids are those of the `id` column, or `h-...` for rows without one",
        )
    return pc.is_in(reading.jobs["id"], value_set=ids).to_numpy()


def _limited(jobs: pa.Table, wanted: Ints, limit: int | None) -> Ints:
    if limit is None or limit >= len(wanted):
        return wanted
    priority = jobs["priority"].to_numpy()[wanted].astype(np.int64)
    return np.sort(wanted[np.argsort(-priority, kind="stable")[:limit]])
