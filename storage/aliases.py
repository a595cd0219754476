"""Where each alias of a model has pointed, and what verifying said of each revision, in an open ledger."""

from __future__ import annotations

from typing import Any

from storage.arrow import to_arrow
from storage.rows import AliasRow


def add(connection: Any, row: AliasRow) -> None:
    connection.register("incoming", to_arrow([row], table="aliases"))
    connection.execute("INSERT INTO aliases BY NAME FROM incoming")
    connection.unregister("incoming")


def changes(connection: Any) -> list[AliasRow]:
    """Every change of every alias, oldest first; none in a ledger that is older than aliases.

    As they were written, not by their time: a clock that is set back must not bring back an old revision.
    """
    if not _has(connection, "aliases"):
        return []
    stored = connection.sql("FROM aliases ORDER BY rowid").to_arrow_table()
    return [AliasRow(**row) for row in stored.to_pylist()]


def verdicts(connection: Any) -> dict[str, bool]:
    """Revision of a model -> whether it passed when it was last compared with another revision."""
    if not _has(connection, "verifications"):
        return {}
    latest = connection.sql(
        """
        WITH compared AS (
            -- With the few-step LoRA that a preset brings along, its revision follows the model's.
            SELECT split_part(model_revision, '+', 1) AS revision,
                split_part(reference_revision, '+', 1) AS reference, passed, verified_at
            FROM verifications WHERE lora IS NULL
        )
        SELECT revision, passed FROM compared WHERE revision <> reference
        QUALIFY row_number() OVER (PARTITION BY revision ORDER BY verified_at DESC) = 1
        """
    ).to_arrow_table()
    return dict(zip(latest["revision"].to_pylist(), latest["passed"].to_pylist(), strict=True))


def _has(connection: Any, table: str) -> bool:
    found = connection.sql(
        "SELECT 1 FROM duckdb_tables() WHERE table_name = $table", params={"table": table}
    ).to_arrow_table()
    return bool(found.num_rows)
