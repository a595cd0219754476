from __future__ import annotations

import runpy
from pathlib import Path

import pyarrow.parquet as pq

from tests.manifest_cases import plan_of, read_file

EXAMPLES = Path(__file__).parent.parent / "manifests" / "examples"


def test_the_demo_manifest_is_what_its_script_makes() -> None:
    made = runpy.run_path(str(EXAMPLES / "make_demo.py"))["demo_table"]()
    assert pq.read_table(EXAMPLES / "demo.parquet").equals(made)


def test_the_demo_is_three_buckets_and_one_rejected_row() -> None:
    reading = read_file(EXAMPLES / "demo.parquet")
    assert reading.jobs.num_rows == 11
    assert reading.jobs["warning"].null_count == 11
    assert reading.rejected["column"].to_pylist() == ["width"]
    assert [(bucket.width, bucket.height) for bucket in plan_of(reading).buckets] == [
        (64, 96),
        (64, 64),
        (96, 64),
    ]
