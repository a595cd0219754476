"""Who a job is: its id, its seed, and the fingerprint of what was asked for.

The fingerprint of a job is the SHA-256 of this text, in UTF-8, one piece per setting in the order of
FINGERPRINTED: `<name>:<length of the value in bytes>:<value>\\n`. Integers are decimal, floats the shortest
text that reads back the same (`5.0`), and a setting without a value (guidance_scale_2 of a model with one
transformer, lora) has no piece, so that later settings can join without changing what is already delivered.
The lengths make it unambiguous whatever a prompt contains.

A row without an id gets `h-` and the first 16 hex digits of the SHA-256 of the same encoding over its own
pixel columns as the manifest gives them: no defaults, no flags, no price, no tags. Equal rows get `-2`, `-3`.
A row without a seed gets the first 63 bits of SHA-256(id), big-endian.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from manifests.arrays import as_text, concatenated, hex_texts, phrase, sha256_rows
from manifests.errors import DuplicateIds
from manifests.wording import counted

FINGERPRINTED = (
    "prompt",
    "negative_prompt",
    "width",
    "height",
    "num_frames",
    "fps_num",
    "fps_den",
    "seed",
    "steps",
    "guidance_scale",
    "guidance_scale_2",
    "flow_shift",
    "model",
    "lora",
    "preset",
    "crf",
    "encoder_preset",
)

Hashes = npt.NDArray[np.uint64]


def fingerprints(jobs: pa.RecordBatch) -> pa.Array:
    """64 hex digits for each row that has the columns FINGERPRINTED."""
    return hex_texts(_digests({name: jobs.column(name) for name in FINGERPRINTED}))


def row_hashes(written: Mapping[str, pa.Array]) -> Hashes:
    """64 bits of each row's hash over what its pixel columns say, nulls left out."""
    return _digests(written)[:, :8].copy().view(">u8").reshape(-1).astype(np.uint64)


def derived_seeds(ids: pa.Array) -> npt.NDArray[np.int64]:
    """63 bits of SHA-256(id)."""
    digests = sha256_rows(ids)
    words = digests[:, :8].copy().view(">u8").reshape(-1)
    return (words >> np.uint64(1)).astype(np.int64)


def derived_ids(hashes: Hashes, *, taken: pa.Array) -> pa.Array:
    """`h-` and 16 hex digits for each hash in the manifest's order; the second of equal hashes gets `-2`,
    and so on, past any that is an explicit id (taken)."""
    number = _occurrence(hashes)
    digits = hex_texts(hashes.astype(">u8").view(np.uint8).reshape(-1, 8))
    numbered = _numbered(digits, number)
    while pc.any(pc.is_in(numbered, value_set=taken)).as_py():
        # Somebody named a clip as we would: the whole family of that hash moves past it.
        clash = pc.is_in(numbered, value_set=taken).to_numpy(zero_copy_only=False)
        number += np.isin(hashes, hashes[clash])
        numbered = _numbered(digits, number)
    return numbered


def _numbered(digits: pa.Array, number: npt.NDArray[np.int64]) -> pa.Array:
    first = pa.array(number == 1)
    return pc.if_else(first, phrase("h-", digits), phrase("h-", digits, "-", number))


def _occurrence(hashes: Hashes) -> npt.NDArray[np.int64]:
    """1 for the first of equal values, 2 for the second, in order."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(hashes)])
    sizes = np.diff(np.append(starts, len(hashes)))
    number = np.empty(len(hashes), np.int64)
    number[order] = np.arange(len(hashes)) - np.repeat(starts, sizes) + 1
    return number


def require_unique(tables: Sequence[pa.Table]) -> None:
    """tables: file, row, id (null: none given). Raises DuplicateIds naming the rows of the first few."""
    table = pa.concat_tables(tables, promote_options="default")
    table = table.filter(pc.is_valid(table["id"]))
    if pc.count_distinct(table["id"]).as_py() == table.num_rows:
        return
    counts = pc.value_counts(table["id"])
    repeated = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")
    shown = [f"`{id}` in {_places(table, id)}" for id in repeated[:3].to_pylist()]
    more = f"; and {len(repeated) - 3} more ids" if len(repeated) > 3 else ""
    raise DuplicateIds(
        f"duplicate id: {'; '.join(shown)}{more}",
        hint="an id names one clip: make them different, or leave them null and ids are made from the rows",
    )


def _places(table: pa.Table, id: str) -> str:
    rows = table.filter(pc.equal(table["id"], id)).select(["file", "row"])
    places = [f"{row['file']} row {row['row']}" for row in rows.slice(0, 5).to_pylist()]
    if rows.num_rows > 5:
        places.append(counted(rows.num_rows - 5, "more row"))
    return " and ".join(places)


_ROWS_AT_ONCE = 8192  # their text stays in cache, and its memory is used again


def _digests(values: Mapping[str, pa.Array]) -> npt.NDArray[np.uint8]:
    """(rows, 32): SHA-256 of each row's encoded values."""
    count = max(map(len, values.values()))
    pieces = [
        sha256_rows(_encoded({name: array.slice(begin, _ROWS_AT_ONCE) for name, array in values.items()}))
        for begin in range(0, count, _ROWS_AT_ONCE)
    ]
    return np.concatenate([np.empty((0, 32), np.uint8), *pieces])


def _encoded(values: Mapping[str, pa.Array]) -> pa.Array:
    """`<name>:<bytes>:<value>\\n` of every value that is not null, row by row."""
    parts: list[str | pa.Array] = []
    for name, array in values.items():
        text = as_text(array)
        piece = (f"{name}:", pc.binary_length(text).cast(pa.string()), ":", text, "\n")
        # One flat join where nothing is null: 3 s instead of 5 s for a million rows.
        parts += [phrase(*piece)] if text.null_count else piece
    return concatenated(parts)
