"""The rows agree with the tables of the ledger."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import pytest

from manifests.table import JOBS_SCHEMA
from storage.arrow import ROW_TYPES
from tests.storage_rows import cap_row, new_ledger, outcome, probe_row, start


@pytest.mark.parametrize("table", ROW_TYPES)
def test_row_fields_are_the_columns_in_their_order(table: str, tmp_path: Path) -> None:
    stored = new_ledger(tmp_path).tables(table)[table]
    assert [field.name for field in fields(ROW_TYPES[table])] == stored.schema.names


def test_job_columns_are_those_of_the_jobs_table(tmp_path: Path) -> None:
    stored = new_ledger(tmp_path).tables("jobs")["jobs"].schema
    assert stored.names == ["run_id", "state", "reason", *JOBS_SCHEMA.names]
    for field in JOBS_SCHEMA:
        assert stored.field(field.name).type.equals(field.type), field.name


def test_every_field_survives_the_ledger(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a")
    written = outcome("a", caps=(cap_row("b64", 2),))
    ledger.record([written])
    probes = (probe_row("b64"), probe_row("b64", size=2, clip_step_s=None))
    ledger.add_probes(probes[:1])
    ledger.add_probes(probes[1:])
    tables = ledger.tables("batches", "attempts", "clips", "caps", "probes")
    assert tables.pop("probes").to_pylist() == [asdict(row) for row in probes]
    for name, row in [
        ("batches", written.batch),
        ("attempts", written.attempts[0]),
        ("clips", written.clips[0]),
        ("caps", written.caps[0]),
    ]:
        (stored,) = tables[name].to_pylist()
        assert stored == {field.name: getattr(row, field.name) for field in fields(row)}
