"""Rows of the ledger as Arrow tables, the only form in which DuckDB is fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any

import pyarrow as pa

from storage.rows import AliasRow, AttemptRow, BatchRow, CapRow, ClipRow, ProbeRow, RunRow, VerificationRow

Row = RunRow | BatchRow | AttemptRow | ClipRow | CapRow | ProbeRow | AliasRow | VerificationRow

ROW_TYPES: dict[str, type[Row]] = {
    "runs": RunRow,
    "batches": BatchRow,
    "attempts": AttemptRow,
    "clips": ClipRow,
    "caps": CapRow,
    "probes": ProbeRow,
    "aliases": AliasRow,
    "verifications": VerificationRow,
}

_ARROW_TYPES = {
    "str": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "datetime": pa.timestamp("us", "UTC"),
    "dict[str, str]": pa.map_(pa.string(), pa.string()),
}


def to_arrow(rows: Sequence[Row], *, table: str) -> pa.Table:
    """The rows as a table with the columns of the ledger's `table`."""
    columns = fields(ROW_TYPES[table])
    return pa.table(
        [pa.array([_value(row, column) for row in rows], _arrow_type(column)) for column in columns],
        names=[column.name for column in columns],
    )


def _arrow_type(column: Field[Any]) -> pa.DataType:
    assert isinstance(column.type, str)  # annotations are not evaluated in storage.rows
    return _ARROW_TYPES[column.type.removesuffix(" | None")]


def _value(row: Row, column: Field[Any]) -> Any:
    value = getattr(row, column.name)
    if isinstance(value, str) and not value.isascii():
        # Half a surrogate pair (an undecodable path in a traceback) must not cost the whole row.
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return list(value.items())
    assert getattr(value, "tzinfo", True) is not None, f"{column.name} without a time zone: {value}"
    return value
