"""Small operations on Arrow arrays that pyarrow lacks: hashing, phrases, shared constants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

CHUNK_ROWS = 65_536


def plain(column: pa.Array) -> pa.Array:
    """Without dictionary encoding or an extension type's name; a UUID as its 36 characters."""
    if pa.types.is_dictionary(column.type):
        return plain(column.dictionary_decode())
    if isinstance(column, pa.ExtensionArray):
        is_uuid = column.type.extension_name == "arrow.uuid"
        return _uuid_texts(column.storage) if is_uuid else plain(column.storage)
    return column


def _uuid_texts(storage: pa.Array) -> pa.Array:
    digits = [value and value.hex() for value in storage.to_pylist()]
    pattern = r"(.{8})(.{4})(.{4})(.{4})(.{12})"
    return pc.replace_substring_regex(
        pa.array(digits, pa.string()), pattern=pattern, replacement=r"\1-\2-\3-\4-\5"
    )


def repeated(value: str, count: int) -> pa.Array:
    """One string count times (at most CHUNK_ROWS); all such arrays of a value share one buffer."""
    return _constant(value)[:count]


@lru_cache(maxsize=64)
def _constant(value: str) -> pa.Array:
    return pa.repeat(pa.scalar(value, pa.string()), CHUNK_ROWS)


def spread(values: Sequence[str], codes: Ints) -> pa.Array:
    """values[code] for each code. Shares memory when all codes are the same."""
    if len(codes) == 0 or (codes[0] == codes).all():
        return repeated(values[codes[0]] if len(codes) else "", len(codes))
    return pa.array(values, pa.string()).take(pa.array(codes))


def phrase(*parts: str | pa.Array | npt.NDArray[np.generic]) -> pa.Array:
    """The parts joined row by row. Numbers become text; a null in a part makes that row null."""
    return pc.binary_join_element_wise(*map(_as_text, parts), "")


def joined(parts: Sequence[pa.Array], separator: str) -> pa.Array:
    """The non-null parts of each row, joined; null where every part is."""
    # Arrow's own null_handling="skip" loses rows whose parts are all null (measured with pyarrow 26).
    whole = concatenated([phrase(separator, part) for part in parts])
    texts = pc.utf8_slice_codeunits(whole, len(separator))
    return pc.if_else(pc.equal(whole, ""), pa.scalar(None, pa.string()), texts)


def concatenated(parts: Sequence[str | pa.Array]) -> pa.Array:
    """The parts of each row one after the other, a null as nothing."""
    return pc.binary_join_element_wise(*parts, "", null_handling="replace", null_replacement="")


def _as_text(part: str | pa.Array | npt.NDArray[np.generic]) -> str | pa.Array:
    return part if isinstance(part, str) else as_text(pa.array(part))


def as_text(array: pa.Array) -> pa.Array:
    """Strings as they are, numbers as text that reads back the same."""
    if pa.types.is_floating(array.type):
        return float_texts(array)
    return array if pa.types.is_string(array.type) else array.cast(pa.string())


def float_texts(numbers: pa.Array) -> pa.Array:
    """The shortest text that reads back as the same float64, the same in every pyarrow version."""
    codes = numbers.dictionary_encode()
    texts = pa.array([repr(value) for value in codes.dictionary.to_pylist()], pa.string())
    return texts.take(codes.indices)


def sha256_rows(texts: pa.Array) -> npt.NDArray[np.uint8]:
    """SHA-256 of each row's bytes. texts: string or binary, no nulls. Returns (rows, 32)."""
    assert texts.null_count == 0
    if len(texts) == 0:
        return np.empty((0, 32), np.uint8)
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].tolist()
    view = memoryview(data) if data is not None else memoryview(b"")
    digests = b"".join([sha256(view[begin:end]).digest() for begin, end in pairwise(ends)])
    return np.frombuffer(digests, np.uint8).reshape(-1, 32)


def hex_texts(rows: npt.NDArray[np.uint8]) -> pa.Array:
    """(rows, k) bytes as rows of 2k hex digits."""
    count, width = rows.shape
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(2 * width)
    data = np.ascontiguousarray(rows).tobytes().hex().encode()
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(data))


def gather(table: pa.Table, rows: Ints) -> pa.Table:
    """table.take without copying what need not be, see take."""
    if len(rows) == 0:
        return table.slice(0, 0)
    return pa.Table.from_arrays([take(column, rows) for column in table.columns], schema=table.schema)


def take(column: pa.ChunkedArray, rows: Ints) -> pa.ChunkedArray:
    """column.take(rows), but all rows in order are the column itself, a string column that repeats one
    value shares its memory, and strings may pass 2 GB."""
    if len(rows) == len(column) and (rows == np.arange(len(rows))).all():
        return column
    if pa.types.is_string(column.type) and _is_constant(column):
        sizes = [min(CHUNK_ROWS, len(rows) - begin) for begin in range(0, len(rows), CHUNK_ROWS)]
        return pa.chunked_array([repeated(column[0].as_py(), size) for size in sizes], pa.string())
    return pa.chunked_array(_taken(column, rows), column.type)


def _is_constant(column: pa.ChunkedArray) -> bool:
    if len(column) == 0 or not column[0].is_valid:
        return False
    return bool(pc.all(pc.equal(column, column[0]), skip_nulls=False).as_py())


_SHORTEST_RUN = 1024


def _taken(column: pa.ChunkedArray, rows: Ints) -> Iterator[pa.Array]:
    """Chunk by chunk where rows stay long enough in each, as those of a bucket do: Arrow would join the
    chunks first, another 200 MB for a million prompts. Else from one joined copy."""
    ends = np.cumsum([len(chunk) for chunk in column.chunks])
    chunk_of = np.searchsorted(ends, rows, side="right")
    starts = np.flatnonzero(np.diff(chunk_of, prepend=-1))
    if len(starts) * _SHORTEST_RUN <= len(rows) + len(ends) * _SHORTEST_RUN:
        for start, stop in pairwise([*starts.tolist(), len(rows)]):
            chunk = column.chunk(int(chunk_of[start]))
            yield chunk.take(pa.array(rows[start:stop] - (ends[chunk_of[start]] - len(chunk))))
        return
    # Large offsets, because the prompts of ten million rows pass 2 GB.
    whole = (column.cast(pa.large_string()) if pa.types.is_string(column.type) else column).combine_chunks()
    for start in range(0, len(rows), CHUNK_ROWS):
        yield whole.take(pa.array(rows[start : start + CHUNK_ROWS])).cast(column.type)
