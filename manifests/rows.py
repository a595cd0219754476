"""One record batch of a manifest with what is wrong in it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manifests.arrays import Mask, joined, plain
from manifests.table import REJECTED_SCHEMA

_LONGEST_VALUE = 100


class Rows:
    """A record batch, which of its rows are still good, and why the others are not.

    file: as shown in messages. first: the row number in the file of the batch's first row.
    written: columns as they were understood, without defaults; null where a row gives none.
    """

    def __init__(self, batch: pa.RecordBatch, *, file: str, first: int) -> None:
        self._batch = batch
        self._columns: dict[str, pa.Array] = {}
        self._warnings: list[pa.Array] = []
        self._rejections: dict[int, tuple[str, str | None, str]] = {}
        self.file = file
        self.written: dict[str, pa.Array] = {}
        self.numbers = np.arange(first, first + batch.num_rows)
        self.ok: Mask = np.ones(batch.num_rows, np.bool_)

    def __len__(self) -> int:
        return self._batch.num_rows

    def column(self, name: str) -> pa.Array | None:
        """As read from Parquet, plainly encoded; None when the file has no such column."""
        if name not in self._columns and name in self._batch.schema.names:
            self._columns[name] = plain(self._batch.column(name))
        return self._columns.get(name)

    def reject(self, bad: Mask, column: str, reason: str | Callable[[int], str]) -> None:
        """Give up rows for a reason (or the reason of a row's index). A row keeps its first one."""
        for index in np.flatnonzero(bad & self.ok).tolist():
            text = reason if isinstance(reason, str) else reason(index)
            self._rejections[index] = (column, self._value(column, index), text)
        self.ok &= ~bad

    def warn(self, warned: Mask, text: Callable[[], pa.Array]) -> None:
        """Say something about rows that run; text is only built when there are any."""
        if (warned & self.ok).any():
            self._warnings.append(pc.if_else(pa.array(warned), text(), pa.scalar(None, pa.string())))

    def warnings(self) -> pa.Array:
        """Every row's warnings as one text, null where there is none."""
        if not self._warnings:
            return pa.nulls(len(self), pa.string())
        return joined(self._warnings, "; ")

    def rejected(self, *, ids: pa.Array, tags: pa.Array) -> pa.Table:
        """The rows given up, as REJECTED_SCHEMA, in the file's order."""
        indexes = sorted(self._rejections)
        columns = [self._rejections[index] for index in indexes]
        taken = pa.array(indexes, pa.int64())
        return pa.table(
            [
                pa.array([self.file] * len(indexes), pa.string()),
                pa.array(self.numbers[indexes] if indexes else [], pa.int64()),
                ids.take(taken),
                pa.array([column for column, _, _ in columns], pa.string()),
                pa.array([value for _, value, _ in columns], pa.string()),
                pa.array([reason for _, _, reason in columns], pa.string()),
                tags.take(taken),
            ],
            schema=REJECTED_SCHEMA,
        )

    def _value(self, column: str, index: int) -> str | None:
        array = self.column(column)
        if array is None or not array[index].is_valid:
            return None
        try:
            value = array[index].as_py()
        except UnicodeDecodeError:
            value = array[index].as_buffer().to_pybytes()
        except (OverflowError, ValueError):  # a duration that Python's own type cannot hold
            value = array[index].cast(pa.string()).as_py()
        text = value if isinstance(value, str) else repr(value) if isinstance(value, float) else str(value)
        return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
