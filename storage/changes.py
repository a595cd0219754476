"""What is written to a ledger that is open: jobs, outcomes, run updates, and spools replayed once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from storage.arrow import to_arrow
from storage.rows import CapRow, ClipRow, ProbeRow, RunRow, RunUpdate
from storage.spool import Entry, Spool, rows_by_table, run_updates


def add_run(connection: Any, run: RunRow) -> None:
    _insert(connection, to_arrow([run], table="runs"), into="runs")


def add_jobs(connection: Any, jobs: pa.Table, *, run_id: str, state: str) -> None:
    """jobs: JOBS_SCHEMA columns and `reason`; a column left out is null."""
    _insert(connection, jobs, into="jobs", run_id=run_id, state=state)


def add_rejected(connection: Any, rejected: pa.Table, *, run_id: str) -> None:
    """rejected: REJECTED_SCHEMA; column, reason and value become one reason."""
    connection.register("rejected", rejected)
    connection.execute(
        """
        INSERT INTO jobs BY NAME
        SELECT $run_id AS run_id, 'rejected' AS state, file, "row", id, tags,
            "column" || ': ' || reason || coalesce(' (' || nullif(value, '') || ')', '') AS reason
        FROM rejected
        """,
        {"run_id": run_id},
    )
    connection.unregister("rejected")


def add_clips(connection: Any, clips: Sequence[ClipRow]) -> None:
    if clips:
        _insert(connection, to_arrow(clips, table="clips"), into="clips")


def add_probes(connection: Any, probes: Sequence[ProbeRow], caps: Sequence[CapRow]) -> None:
    for table, rows in (("probes", probes), ("caps", caps)):
        if rows:
            _insert(connection, to_arrow(rows, table=table), into=table)


def apply(connection: Any, entries: Sequence[Entry]) -> None:
    for table, rows in rows_by_table(entries).items():
        if rows:
            _insert(connection, to_arrow(rows, table=table), into=table)
    update_runs(connection, run_updates(entries))


def update_runs(connection: Any, updates: Sequence[RunUpdate]) -> None:
    for update in updates:
        connection.execute(
            """
            UPDATE runs SET
                device_s = $device_s,
                heartbeat_at = coalesce($heartbeat_at::TIMESTAMPTZ, heartbeat_at),
                ended_at = coalesce($ended_at::TIMESTAMPTZ, ended_at),
                state = coalesce($state, state),
                exit_code = coalesce($exit_code::INTEGER, exit_code),
                gpu_name = coalesce($gpu_name, gpu_name)
            WHERE run_id = $run_id
            """,
            {
                "run_id": update.run_id,
                "device_s": update.device_s,
                "heartbeat_at": update.heartbeat_at,
                "ended_at": update.ended_at,
                "state": update.state,
                "exit_code": update.exit_code,
                "gpu_name": update.gpu_name,
            },
        )


def close_dead_runs(connection: Any, *, at: datetime) -> list[str]:
    """Ends every run still `running` at its last heartbeat; says which. The caller holds the lock."""
    dead = connection.sql("SELECT run_id FROM runs WHERE state = 'running'").to_arrow_table()
    connection.execute(
        """
        UPDATE runs SET state = 'killed', ended_at = least(heartbeat_at, $at::TIMESTAMPTZ)
        WHERE state = 'running'
        """,
        {"at": at},
    )
    return list(dead["run_id"].to_pylist())


def pending_spools(connection: Any, spools: Sequence[Spool]) -> list[Spool]:
    """Those of `spools` that no transaction has replayed yet, oldest first."""
    # A writer may be deleting the others at this moment, so only these are touched.
    flushed = set(connection.sql("SELECT flush_id FROM flushes").to_arrow_table()["flush_id"].to_pylist())
    pending = [spool for spool in spools if spool.id not in flushed]
    return sorted(pending, key=lambda spool: spool.path.stat().st_mtime_ns)


def replay(connection: Any, spool: Spool) -> None:
    """Applies a spool and records that it did, inside the caller's transaction."""
    entries = spool.read()
    apply(connection, entries)
    connection.execute("INSERT INTO flushes VALUES (?, ?, ?)", [spool.id, datetime.now(UTC), len(entries)])


def _insert(connection: Any, rows: pa.Table, *, into: str, **constants: str) -> None:
    connection.register("incoming", rows)
    names = "".join(f"${name} AS {name}, " for name in constants)
    connection.execute(f"INSERT INTO {into} BY NAME SELECT {names}* FROM incoming", constants)
    connection.unregister("incoming")
