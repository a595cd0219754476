"""What earlier runs left, and what it means for each job: reuse it, render it, or give it up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manifests.arrays import Ints, Mask, gather, joined, phrase, take

COMPARED_ROWS = 100_000
NO_TEXT = pa.scalar(None, pa.string())

# What the fingerprint holds, as reasons name it.
_SETTINGS = {
    "prompt": ("prompt",),
    "negative_prompt": ("negative_prompt",),
    "size": ("width", "height"),
    "num_frames": ("num_frames",),
    "fps": ("fps_num", "fps_den"),
    "seed": ("seed",),
    "steps": ("steps",),
    "guidance_scale": ("guidance_scale",),
    "guidance_scale_2": ("guidance_scale_2",),
    "flow_shift": ("flow_shift",),
    "model": ("model",),
    "preset": ("preset",),
    "lora": ("lora",),
    "crf": ("crf",),
    "encoder_preset": ("encoder_preset",),
}


@dataclass(frozen=True, kw_only=True)
class History:
    """What the ledger and the output folder hold.

    clips: id, fingerprint, file, model_revision, numerics (null: not known), present (the file is there);
    the latest last. failures: id, fingerprint, number (failed attempts so far), reason, one row each.
    previous: ids -> JOBS_SCHEMA's id and setting columns as last delivered, in any order, an id without
    a clip left out. On this machine, by Bucket.key: probed: the cap that was measured, in place of the
    model's own; caps: what running out of memory has lowered it to since.
    """

    clips: pa.Table
    failures: pa.Table
    previous: Callable[[pa.Array], pa.Table]
    caps: Mapping[str, int]
    probed: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Per job. clip: row of History.clips to reuse, or -1. exhausted: tried often enough.
    reason: why it is reused, given up or rendered again; null when it was never delivered."""

    clip: Ints
    exhausted: Mask
    reason: pa.Array


def judge(
    jobs: pa.Table, *, history: History, refresh: frozenset[str], numerics: str, max_attempts: int
) -> Verdict:
    """jobs: JOBS_SCHEMA. refresh: of `model` and `numerics`, what must not have changed since."""
    clips = _Matches(jobs, history.clips)
    new_revision = clips.where_differs("model_revision", jobs["model_revision"])
    new_numerics = clips.where_differs("numerics", _same(numerics, jobs.num_rows))
    stale = ("model" in refresh) & new_revision | ("numerics" in refresh) & new_numerics
    reused = clips.present & ~stale
    tries, failure = _failures(jobs, history.failures)
    exhausted = ~reused & (tries >= max_attempts)

    again = [
        _where(clips.present & new_revision & ("model" in refresh), "model revision changed"),
        _where(clips.present & new_numerics & ("numerics" in refresh), "numerics changed"),
        _where(clips.found & ~clips.present, "file missing or damaged"),
        _changes(jobs, clips.delivered & ~clips.found, history.previous),
        _where(tries > 0, lambda: phrase("failed before (attempt ", tries + 1, f" of {max_attempts})")),
    ]
    kept = [
        _where(reused, "delivered before"),
        _where(reused & new_revision, "by another model revision"),
        _where(reused & new_numerics, "by other numerics"),
    ]
    gave_up = [_where(exhausted, lambda: phrase("gave up after ", tries, " attempts: ", failure()))]
    reason = pc.if_else(pa.array(reused), _reasons(kept, ", "), _reasons(again, "; "))
    return Verdict(
        clip=np.where(reused, clips.index, -1),
        exhausted=exhausted,
        reason=pc.if_else(pa.array(exhausted), _reasons(gave_up, ""), reason),
    )


def _reasons(parts: Sequence[pa.Array | None], separator: str) -> pa.Array:
    said = [part for part in parts if part is not None]
    return joined(said, separator) if said else NO_TEXT


def _where(flags: Mask, text: str | Callable[[], pa.Array]) -> pa.Array | None:
    """text where the flags are set, null elsewhere; None where none is set."""
    if not flags.any():
        return None
    return pc.if_else(pa.array(flags), text if isinstance(text, str) else text(), NO_TEXT)


def _same(value: str, count: int) -> pa.ChunkedArray:
    return pa.chunked_array([pa.repeat(pa.scalar(value), count)])


class _Matches:
    """Which clip is each job's. index: row of its latest present clip of the same fingerprint, else of
    its latest one, else -1. delivered: whether the id ever was, with whatever settings."""

    def __init__(self, jobs: pa.Table, clips: pa.Table) -> None:
        self._clips = clips
        ids = clips["id"].cast(pa.string())
        job = pc.fill_null(pc.index_in(ids, value_set=jobs["id"].combine_chunks()), -1).to_numpy()
        known = np.flatnonzero(job >= 0)
        differs = _differs(clips["fingerprint"], known, jobs["fingerprint"], job[known])
        same = known[~differs]
        there = same[clips["present"].to_numpy()[same]]
        self.index = np.full(jobs.num_rows, -1, np.int64)
        self.index[job[same]] = same  # of several, the last assigned stays
        self.index[job[there]] = there
        self.found = self.index >= 0
        self.present = np.zeros(jobs.num_rows, np.bool_)
        self.present[job[there]] = True
        self.delivered = np.zeros(jobs.num_rows, np.bool_)
        self.delivered[job[known]] = True

    def where_differs(self, name: str, now: pa.ChunkedArray) -> Mask:
        """Found jobs whose clip has another value than now; what is not known differs from nothing."""
        rows = np.flatnonzero(self.found)
        flags = np.zeros(len(self.found), np.bool_)
        flags[rows] = _differs(self._clips[name], self.index[rows], now, rows)
        return flags


def _differs(then: pa.ChunkedArray, then_rows: Ints, now: pa.ChunkedArray, now_rows: Ints) -> Mask:
    """then[i] != now[j] for each pair of rows; false where either is null."""
    return pc.fill_null(pc.not_equal(take(then, then_rows), take(now, now_rows)), False).to_numpy()


def _failures(jobs: pa.Table, failures: pa.Table) -> tuple[Ints, Callable[[], pa.Array]]:
    """Failed attempts of each job, and the last one's reason when asked.

    Rows of equal content have one fingerprint, but each its own tries.
    """
    tried = pc.is_in(
        jobs["fingerprint"], value_set=failures["fingerprint"].cast(pa.string()).combine_chunks()
    )
    candidates = np.flatnonzero(tried.to_numpy())
    row = np.full(jobs.num_rows, -1, np.int64)
    found = pc.index_in(_identity(gather(jobs, candidates)), value_set=_identity(failures))
    row[candidates] = pc.fill_null(found, -1).to_numpy()
    place = pa.array(row, mask=row < 0)
    number = failures["number"].cast(pa.int64()).combine_chunks()
    reason = failures["reason"].cast(pa.string()).combine_chunks()
    tries = pc.fill_null(number.take(place), 0).to_numpy(zero_copy_only=False)
    return tries, lambda: pc.fill_null(reason.take(place), "no reason recorded")


def _identity(table: pa.Table) -> pa.Array:
    """A fingerprint has a fixed length, so the two together are unambiguous."""
    columns = (table[name].cast(pa.string()).combine_chunks() for name in ("fingerprint", "id"))
    return pc.binary_join_element_wise(*columns, "")


def _changes(jobs: pa.Table, changed: Mask, previous: Callable[[pa.Array], pa.Table]) -> pa.Array | None:
    """`seed, steps changed` for jobs that were delivered with other settings, null for the others."""
    rows = np.flatnonzero(changed)
    if not len(rows):
        return None
    # A part at a time: earlier prompts of a million changed rows would not fit beside the new ones.
    parts = [rows[start : start + COMPARED_ROWS] for start in range(0, len(rows), COMPARED_ROWS)]
    listed = pa.chunked_array([_listed_changes(jobs.take(pa.array(part)), previous) for part in parts])
    return pc.replace_with_mask(
        pa.nulls(len(changed), pa.string()), pa.array(changed), phrase(listed.combine_chunks(), " changed")
    )


def _listed_changes(now: pa.Table, previous: Callable[[pa.Array], pa.Table]) -> pa.Array:
    ids = now["id"].combine_chunks()
    then = previous(ids)
    order = pc.index_in(ids, value_set=then["id"].cast(pa.string()).combine_chunks())
    then = then.take(order)
    names = [_where(_any_differs(now, then, columns), name) for name, columns in _SETTINGS.items()]
    # Unknown to the ledger, or hashed by another rule: something differs, but not what.
    return pc.if_else(order.is_valid(), pc.fill_null(_reasons(names, ", "), "settings"), "settings")


def _any_differs(now: pa.Table, then: pa.Table, columns: tuple[str, ...]) -> Mask:
    flags = np.zeros(now.num_rows, np.bool_)
    for name in columns:
        before, after = then[name].cast(now.schema.field(name).type), now[name]
        same = pc.fill_null(pc.equal(before, after), False).to_numpy()
        neither = pc.and_(before.is_null(), after.is_null()).to_numpy()
        flags |= ~(same | neither)
    return flags
