"""Lets a reader see what is still in the spool, without writing to the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storage.arrow import to_arrow
from storage.changes import pending_spools, update_runs
from storage.spool import list_spools, rows_by_table, run_updates


def overlay_spools(connection: Any, *, ledger: Path) -> None:
    """Shadows tables by temporary views that add the spooled rows; queries need not know.

    connection: read-only. The writer cannot replay a spool while it is open, so nothing shows twice.
    """
    entries = [entry for spool in pending_spools(connection, list_spools(ledger)) for entry in spool.read()]
    stored = _database(connection)
    for table, rows in rows_by_table(entries).items():
        if rows:
            connection.register(f"spooled_{table}", to_arrow(rows, table=table))
            connection.execute(
                f"CREATE TEMP VIEW {table} AS "
                f"FROM {stored}.main.{table} UNION ALL BY NAME FROM spooled_{table}"
            )
    updates = run_updates(entries)
    if updates:
        connection.execute(f"CREATE TEMP TABLE runs AS FROM {stored}.main.runs")
        update_runs(connection, updates)


def _database(connection: Any) -> str:
    name = connection.sql("SELECT current_database() AS name").to_arrow_table()["name"][0].as_py()
    return '"' + name.replace('"', '""') + '"'
