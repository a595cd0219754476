"""Brings a ledger to the schema this program knows, and turns away those it does not."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from manifests.errors import LedgerError
from storage.migrations import MIGRATIONS


def migrate(connection: Any, *, path: Path) -> None:
    """Applies the missing migrations, each in a transaction with the record of it."""
    tables = {row["table_name"] for row in _rows(connection, "SELECT table_name FROM duckdb_tables()")}
    if tables and "schema_migrations" not in tables:
        raise _not_a_ledger(path)
    connection.execute(
        "CREATE TABLE IF NOT EXISTS schema_migrations (version INTEGER, applied_at TIMESTAMPTZ)"
    )
    applied = _version(connection)
    _refuse_newer(applied, path=path)
    for version, migration in enumerate(MIGRATIONS[applied:], start=applied + 1):
        connection.execute("BEGIN")
        migration(connection)
        connection.execute("INSERT INTO schema_migrations VALUES (?, ?)", [version, datetime.now(UTC)])
        connection.execute("COMMIT")
    if applied < len(MIGRATIONS):
        # DDL must not stay in the write-ahead log, where a kill would leave it to be replayed.
        connection.execute("CHECKPOINT")


def require_current(connection: Any, *, path: Path, or_older: bool = False) -> None:
    """Raises LedgerError for a file that is no ledger, or one of another version of the program.

    or_older: an older one will do, for queries that the first schema can answer.
    """
    if not _rows(connection, "SELECT 1 FROM duckdb_tables() WHERE table_name = 'schema_migrations'"):
        raise _not_a_ledger(path)
    version = _version(connection)
    _refuse_newer(version, path=path)
    if version < len(MIGRATIONS) and not or_older:
        raise LedgerError(
            f"the ledger {path} has schema {version}, this vgbatch needs {len(MIGRATIONS)}",
            hint="`vgbatch run` brings it up to date",
        )


def _refuse_newer(version: int, *, path: Path) -> None:
    if version > len(MIGRATIONS):
        raise LedgerError(
            f"the ledger {path} has schema {version}, this vgbatch knows {len(MIGRATIONS)} at most",
            hint="use the newer vgbatch that made it",
        )


def _not_a_ledger(path: Path) -> LedgerError:
    return LedgerError(
        f"a DuckDB file, but not a vgbatch ledger: {path}", hint="name another file with `--ledger`"
    )


def _version(connection: Any) -> int:
    found = _rows(connection, "SELECT max(version) AS version FROM schema_migrations")
    return found[0]["version"] or 0


def _rows(connection: Any, query: str) -> list[dict[str, Any]]:
    return list(connection.sql(query).to_arrow_table().to_pylist())
