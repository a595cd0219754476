"""Columns the manifest carries along: every row's tags as one map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from manifests.columns import texts
from manifests.rows import Rows

TAGS = pa.map_(pa.string(), pa.string())


def tag_maps(rows: Rows, names: Sequence[str]) -> pa.Array:
    """{column: value as text} of each row; a null stays absent."""
    columns = [texts(rows, name) for name in names]
    present = np.array([column.is_valid().to_numpy(zero_copy_only=False) for column in columns], np.bool_)
    present = present.reshape(len(names), len(rows)).T
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(present.sum(axis=1), out=offsets[1:])
    row, column = np.nonzero(present)  # row by row, in the order of the columns
    values = pa.concat_arrays(columns) if columns else pa.nulls(0, pa.string())
    return pa.MapArray.from_arrays(
        pa.array(offsets),
        pa.array(names, pa.string()).take(pa.array(column)),
        values.take(pa.array(column * len(rows) + row)),
    )
