"""The ledger's schema: pinned, made by migrations, refused when unknown."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest

from manifests.errors import LedgerError
from storage import schema
from storage.ledger import Ledger
from tests.storage_rows import new_ledger, outcome, start

# A released table changes only by a new migration; then this changes with it.
SCHEMA = """
aliases: alias VARCHAR, target VARCHAR, revision VARCHAR, action VARCHAR, forced BOOLEAN, recorded_at TIMESTAMP WITH TIME ZONE
attempts: run_id VARCHAR, batch BIGINT, try_number INTEGER, id VARCHAR, fingerprint VARCHAR, number INTEGER, state VARCHAR, reason VARCHAR, traceback VARCHAR, started_at TIMESTAMP WITH TIME ZONE, ended_at TIMESTAMP WITH TIME ZONE, device_s DOUBLE, write_s DOUBLE
batches: run_id VARCHAR, batch BIGINT, try_number INTEGER, worker INTEGER, device VARCHAR, gpu_name VARCHAR, bucket VARCHAR, model VARCHAR, model_revision VARCHAR, numerics VARCHAR, preset VARCHAR, render_width INTEGER, render_height INTEGER, render_frames INTEGER, steps INTEGER, guidance_scale DOUBLE, guidance_scale_2 DOUBLE, flow_shift DOUBLE, size INTEGER, cap INTEGER, num_jobs INTEGER, state VARCHAR, started_at TIMESTAMP WITH TIME ZONE, load_s DOUBLE, encode_s DOUBLE, denoise_s DOUBLE, decode_s DOUBLE, write_s DOUBLE, device_s DOUBLE, peak_memory_bytes BIGINT, lora VARCHAR
caps: bucket VARCHAR, gpu_name VARCHAR, numerics VARCHAR, cap INTEGER, source VARCHAR, recorded_at TIMESTAMP WITH TIME ZONE
clips: run_id VARCHAR, batch BIGINT, id VARCHAR, fingerprint VARCHAR, file VARCHAR, num_bytes BIGINT, width INTEGER, height INTEGER, num_frames INTEGER, fps_num INTEGER, fps_den INTEGER, seed BIGINT, model VARCHAR, model_revision VARCHAR, numerics VARCHAR, preset VARCHAR, cap INTEGER, gpu_name VARCHAR, adopted BOOLEAN, delivered_at TIMESTAMP WITH TIME ZONE, lora VARCHAR
flushes: flush_id VARCHAR, flushed_at TIMESTAMP WITH TIME ZONE, num_outcomes INTEGER
jobs: run_id VARCHAR, state VARCHAR, reason VARCHAR, file VARCHAR, row BIGINT, id VARCHAR, fingerprint VARCHAR, prompt VARCHAR, negative_prompt VARCHAR, width INTEGER, height INTEGER, num_frames INTEGER, fps_num INTEGER, fps_den INTEGER, seed BIGINT, steps INTEGER, guidance_scale DOUBLE, guidance_scale_2 DOUBLE, flow_shift DOUBLE, preset VARCHAR, model VARCHAR, model_revision VARCHAR, crf INTEGER, encoder_preset VARCHAR, render_width INTEGER, render_height INTEGER, render_frames INTEGER, priority INTEGER, price DECIMAL(18,6), warning VARCHAR, tags MAP(VARCHAR, VARCHAR), lora VARCHAR
probes: probe_id VARCHAR, bucket VARCHAR, model VARCHAR, model_revision VARCHAR, preset VARCHAR, render_width INTEGER, render_height INTEGER, render_frames INTEGER, steps INTEGER, guidance_scale DOUBLE, gpu_name VARCHAR, numerics VARCHAR, size INTEGER, clip_step_s DOUBLE, peak_memory_bytes BIGINT, recorded_at TIMESTAMP WITH TIME ZONE, lora VARCHAR
runs: run_id VARCHAR, started_at TIMESTAMP WITH TIME ZONE, heartbeat_at TIMESTAMP WITH TIME ZONE, ended_at TIMESTAMP WITH TIME ZONE, state VARCHAR, exit_code INTEGER, manifest VARCHAR, out_dir VARCHAR, num_devices INTEGER, device_s DOUBLE, host VARCHAR, gpu_name VARCHAR, versions MAP(VARCHAR, VARCHAR), command VARCHAR, retry_of VARCHAR
schema_migrations: version INTEGER, applied_at TIMESTAMP WITH TIME ZONE
verifications: verification_id VARCHAR, model VARCHAR, model_revision VARCHAR, lora VARCHAR, preset VARCHAR, reference_model VARCHAR, reference_revision VARCHAR, reference_lora VARCHAR, reference_preset VARCHAR, numerics VARCHAR, gpu_name VARCHAR, num_clips INTEGER, passed BOOLEAN, result VARCHAR, verified_at TIMESTAMP WITH TIME ZONE
"""  # noqa: E501


def columns(path: Path) -> str:
    with duckdb.connect(str(path), read_only=True) as connection:
        rows = connection.sql(
            """
            SELECT table_name || ': '
                || string_agg(column_name || ' ' || data_type, ', ' ORDER BY column_index)
            FROM duckdb_columns() WHERE NOT internal GROUP BY table_name ORDER BY table_name
            """
        ).fetchall()
    return "\n" + "\n".join(row[0] for row in rows) + "\n"


def test_schema_is_pinned(tmp_path: Path) -> None:
    assert columns(new_ledger(tmp_path).path) == SCHEMA


def test_ledger_has_no_index_or_constraint(tmp_path: Path) -> None:
    with duckdb.connect(str(new_ledger(tmp_path).path)) as connection:
        assert connection.sql("SELECT * FROM duckdb_indexes()").fetchall() == []
        assert connection.sql("SELECT * FROM duckdb_constraints()").fetchall() == []


def test_creating_twice_changes_nothing(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path / "made" / "here")
    start(ledger, "a")
    ledger.create()
    with duckdb.connect(str(ledger.path)) as connection:
        assert connection.sql("SELECT version FROM schema_migrations").fetchall() == [(1,), (2,), (3,)]
    assert ledger.tables("jobs")["jobs"].num_rows == 1
    assert sorted(path.name for path in ledger.path.parent.iterdir()) == ["vgbatch.duckdb"]


def test_an_older_ledger_is_brought_up_to_date_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a")

    def m004_notes(connection: Any) -> None:
        connection.execute("CREATE TABLE notes (note VARCHAR)")

    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, m004_notes))
    with pytest.raises(LedgerError, match="has schema 3, this vgbatch needs 4"):
        ledger.clips()
    ledger.create()
    assert ledger.tables("jobs")["jobs"].num_rows == 1
    assert "notes: note VARCHAR" in columns(ledger.path)


def take_back_to_the_first_schema(ledger: Ledger) -> None:
    with duckdb.connect(str(ledger.path)) as connection:
        for table in ("probes", "verifications", "aliases"):
            connection.execute(f"DROP TABLE {table}")
        for table in ("jobs", "batches", "clips"):
            connection.execute(f"ALTER TABLE {table} DROP COLUMN lora")
        connection.execute("DELETE FROM schema_migrations WHERE version > 1")


def test_what_run_and_retry_ask_before_they_may_migrate_any_ledger_can_answer(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a")
    ledger.record([outcome("a", state="failed")])
    take_back_to_the_first_schema(ledger)
    with pytest.raises(LedgerError, match="has schema 1, this vgbatch needs 3"):
        ledger.clips()
    assert ledger.pinned_revision("tiny") == "rev1"
    assert ledger.failed_jobs().select(["id", "lora"]).to_pylist() == [{"id": "a", "lora": None}]
    assert (ledger.alias_changes(), ledger.verdicts()) == ([], {})
    last = ledger.last_run(of_manifest=True)
    assert last is not None
    assert last["run_id"] == "r1"


def test_a_migration_that_fails_leaves_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = new_ledger(tmp_path)

    def m004_broken(connection: Any) -> None:
        connection.execute("CREATE TABLE half (x INTEGER)")
        raise RuntimeError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, m004_broken))
        with pytest.raises(RuntimeError, match="killed here"):
            ledger.create()
    assert columns(ledger.path) == SCHEMA
    assert ledger.last_run() is None


def test_a_ledger_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    with duckdb.connect(str(ledger.path)) as connection:
        connection.execute("INSERT INTO schema_migrations VALUES (99, ?)", [datetime.now(UTC)])
    for visit in (ledger.create, ledger.clips, lambda: ledger.record([outcome("a")])):
        with pytest.raises(LedgerError, match="has schema 99, this vgbatch knows 3 at most"):
            visit()


@pytest.mark.parametrize("content", [b"", b"not a database", b"x" * 100_000])
def test_a_file_that_is_not_duckdb_is_named_and_kept(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    for visit in (Ledger(path).create, Ledger(path).clips):
        with pytest.raises(LedgerError, match=r"notes\.txt"):
            visit()
    assert path.read_bytes() == content


def test_another_programs_database_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "sales.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE jobs (title VARCHAR)")
    for visit in (Ledger(path).create, Ledger(path).clips):
        with pytest.raises(LedgerError, match=r"not a vgbatch ledger: .*sales\.duckdb"):
            visit()
    assert columns(path) == "\njobs: title VARCHAR\n"


def test_a_missing_ledger_is_named_with_the_next_step(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "gone.duckdb")
    assert not ledger.exists()
    for visit in (ledger.clips, ledger.check, lambda: ledger.record([outcome("a")])):
        with pytest.raises(LedgerError, match=r"no ledger: .*gone\.duckdb") as caught:
            visit()
        assert caught.value.hint == "`vgbatch run` makes one"
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_making_it_leaves_no_half_made_ledger(tmp_path: Path) -> None:
    for leftover in ("vgbatch.duckdb.new", "vgbatch.duckdb.new.wal"):
        (tmp_path / leftover).write_bytes(b"half")
    ledger = new_ledger(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["vgbatch.duckdb"]
    assert ledger.check() == []


def test_the_log_of_a_deleted_ledger_is_not_replayed_into_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "vgbatch.duckdb"
    script = """
import duckdb, os, sys
connection = duckdb.connect(sys.argv[1])
connection.execute("CREATE TABLE runs (old INTEGER)")
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert (tmp_path / "vgbatch.duckdb.wal").exists()
    path.unlink()
    new_ledger(tmp_path)
    assert columns(path) == SCHEMA


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
def test_instants_are_utc_whatever_the_time_zone(zone: str, tmp_path: Path) -> None:
    """05:30 and 06:30 UTC are the same local hour in New York that night."""
    script = """
import sys
from pathlib import Path
from tests.storage_rows import at, new_ledger, outcome, start
ledger = new_ledger(Path(sys.argv[1]))
start(ledger, "a")
ledger.record([outcome("a", seconds=3600)])
ledger.end_run("r1", ended_at=at(3600), state="done", exit_code=0, device_s=1.0)
run = ledger.last_run()
print(run["started_at"].isoformat(), run["ended_at"].isoformat())
print(ledger.job("a")["attempts"][0]["ended_at"].isoformat())
"""
    printed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "TZ": zone, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert printed == [
        "2026-11-01T05:30:00+00:00",
        "2026-11-01T06:30:00+00:00",
        "2026-11-01T06:30:00+00:00",
    ]
