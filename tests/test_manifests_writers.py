"""Manifests as pandas, polars and DuckDB write them."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pytest

from manifests.errors import ManifestError
from tests.manifest_cases import by_row, read_file, verdicts

BIG = 4873214862074861313


def test_pandas_with_a_range_index(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    frame = pd.DataFrame({"id": ["007", None], "prompt": ["a", "b"], "width": [96, None], "tag": ["x", None]})
    frame["seed"] = pd.array([BIG, None], dtype="Int64")
    frame["duration"] = pd.to_timedelta([2.0, None], unit="s")
    frame["kind"] = pd.Categorical(["k", None])
    frame.to_parquet(path)
    reading = read_file(path)
    assert by_row(reading, "width") == {0: 96, 1: 64}
    assert by_row(reading, "num_frames") == {0: 16, 1: 17}
    assert by_row(reading, "seed")[0] == BIG
    assert by_row(reading, "id")[0] == "007"
    assert by_row(reading, "tags") == {0: [("tag", "x"), ("kind", "k")], 1: []}
    assert reading.notes == ()


def test_pandas_indexes_are_dropped_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    frame = pd.DataFrame({"prompt": ["a", "b", "c"]}, index=[5, 1, 9])
    frame.to_parquet(path)
    reading = read_file(path)
    assert by_row(reading, "tags") == {0: [], 1: [], 2: []}
    assert reading.notes == ("column `__index_level_0__` left out: it is a pandas index",)

    frame.set_index(pd.Index(list("xyz"), name="Seed")).to_parquet(path)
    assert read_file(path).notes == ("column `Seed` left out: it is a pandas index",)


def test_a_pandas_index_may_be_a_column_of_the_manifest_or_a_declared_tag(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    pd.DataFrame({"id": ["a", "b"], "prompt": ["x", "y"]}).set_index("id").to_parquet(path)
    assert by_row(read_file(path), "id") == {0: "a", 1: "b"}
    pd.DataFrame({"sku": ["s"], "prompt": ["x"]}).set_index("sku").to_parquet(path)
    assert by_row(read_file(path, tags=frozenset({"sku"})), "tags") == {0: [("sku", "s")]}


@pytest.mark.parametrize("dtype", [None, "str", "float64", "object"])
def test_an_empty_pandas_frame_is_no_jobs(tmp_path: Path, dtype: str | None) -> None:
    path = tmp_path / "m.parquet"
    pd.DataFrame(columns=["id", "prompt"], dtype=dtype).to_parquet(path)
    assert read_file(path).jobs.num_rows == 0


def test_integers_that_pandas_made_floats(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    pd.DataFrame({"prompt": ["a", "b", "c"], "seed": [5, None, BIG], "steps": [10, None, 2.5]}).to_parquet(
        path
    )
    reading = read_file(path)
    assert verdicts(reading) == {0: "ok", 1: "ok", 2: "seed"}
    assert by_row(reading, "seed")[0] == 5
    assert by_row(reading, "steps") == {0: 10, 1: 4}


def test_polars(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    pl.DataFrame(
        {
            "prompt": ["a", "b"],
            "seed": pl.Series([2**63 - 1, None], dtype=pl.UInt64),
            "duration": [timedelta(seconds=2), None],
            "fps": pl.Series([23.976, None], dtype=pl.Float32),
            "negative_prompt": pl.Series([None, None], dtype=pl.Null),
            "preset": pl.Series(["exact", None], dtype=pl.Categorical),
            "customer": pl.Series(["acme", "globex"], dtype=pl.Enum(["acme", "globex"])),
            "price": pl.Series([Decimal("0.25"), None], dtype=pl.Decimal(38, 10)),
        }
    ).write_parquet(path)
    reading = read_file(path)
    assert verdicts(reading) == {0: "ok", 1: "ok"}
    assert by_row(reading, "seed")[0] == 2**63 - 1
    assert by_row(reading, "num_frames") == {0: 48, 1: 17}
    assert by_row(reading, "fps_den") == {0: 1001, 1: 1}
    assert by_row(reading, "price") == {0: Decimal("0.25"), 1: None}
    assert by_row(reading, "tags") == {0: [("customer", "acme")], 1: [("customer", "globex")]}


def test_duckdb(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    duckdb.sql(
        f"""
        COPY (
            SELECT * FROM (VALUES
                ('6f0e6fd3-7d43-4c5b-a3a2-6e9b0b1d9c5e'::UUID, 'a', 96::UTINYINT, 5::HUGEINT,
                 0.25::DECIMAL(10, 4), 'gold'::ENUM('gold', 'silver'), 23.976::DECIMAL(6, 3),
                 NULL::INTEGER, true),
                (NULL, 'b', NULL, NULL, NULL, NULL, NULL, NULL, NULL)
            ) rows(id, prompt, width, seed, price, plan, fps, steps, live)
        ) TO '{path}'
        """
    )
    reading = read_file(path)
    assert verdicts(reading) == {0: "ok", 1: "ok"}
    assert by_row(reading, "id")[0] == "6f0e6fd3-7d43-4c5b-a3a2-6e9b0b1d9c5e"
    assert by_row(reading, "width") == {0: 96, 1: 64}
    assert by_row(reading, "seed")[0] == 5
    assert by_row(reading, "fps_num") == {0: 24000, 1: 8}
    assert by_row(reading, "price") == {0: Decimal("0.25"), 1: None}
    assert by_row(reading, "tags") == {0: [("plan", "gold"), ("live", "true")], 1: []}


def test_a_duckdb_interval_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    duckdb.sql(f"COPY (SELECT 'a' AS prompt, INTERVAL 2 SECOND AS duration) TO '{path}'")
    with pytest.raises(ManifestError, match=r"`duration`.*seconds"):
        read_file(path)
