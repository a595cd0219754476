"""Proves that a ledger holds each thing once: what `vgbatch doctor --ledger` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storage.changes import pending_spools
from storage.spool import list_spools

# Each query gives one row per problem, already in words.
_PROBLEMS = (
    """
    SELECT 'clip recorded ' || count(*) || ' times in run ' || run_id || ': ' || id AS problem
    FROM clips GROUP BY run_id, id, fingerprint HAVING count(*) > 1
    """,
    """
    SELECT 'attempt recorded ' || count(*) || ' times in run ' || run_id || ': ' || id
        || ' (batch ' || batch || ', try ' || try_number || ')' AS problem
    FROM attempts GROUP BY run_id, id, batch, try_number HAVING count(*) > 1
    """,
    """
    SELECT 'clip without a job in run ' || run_id || ': ' || id AS problem
    FROM clips ANTI JOIN jobs USING (run_id, id, fingerprint)
    """,
    "SELECT 'spool replayed ' || count(*) || ' times: ' || flush_id AS problem FROM flushes "
    "GROUP BY flush_id HAVING count(*) > 1",
)


def check(connection: Any, *, ledger: Path) -> list[str]:
    """Every problem found, a sentence each; none for a sound ledger."""
    problems = [
        row["problem"]
        for query in _PROBLEMS
        for row in connection.sql(f"{query} ORDER BY problem").to_arrow_table().to_pylist()
    ]
    return problems + [
        f"outcomes still in a spool, the next run will take them in: {spool.path}"
        for spool in pending_spools(connection, list_spools(ledger))
    ]
