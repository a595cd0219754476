"""What the planner asks a ledger that is open: what is delivered, what failed, what it took.

"Latest" is by instant: an attempt's `ended_at`, a clip's `delivered_at`, a run's `started_at`.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from manifests.table import JOBS_SCHEMA

# What was asked for, without where the row came from and what it became.
_NO_SETTINGS = {"file", "row", "priority", "price", "warning", "tags"}
SETTING_COLUMNS = [
    name for name in JOBS_SCHEMA.names if name not in _NO_SETTINGS and not name.startswith("render_")
]

_FAILED = """
    WITH latest AS (
        FROM attempts
        WHERE fingerprint IN (SELECT fingerprint FROM attempts WHERE state <> 'delivered')
        QUALIFY row_number() OVER (PARTITION BY id, fingerprint ORDER BY ended_at DESC, number DESC) = 1
    )
    FROM latest WHERE state <> 'delivered' AND NOT EXISTS (
        FROM clips
        WHERE clips.id = latest.id AND clips.fingerprint = latest.fingerprint
            AND clips.delivered_at >= latest.ended_at
    )
"""


def clips(connection: Any) -> pa.Table:
    """id, fingerprint, file, num_bytes, model_revision, numerics of the latest clip of each job."""
    return connection.sql(
        """
        SELECT id, fingerprint, file, num_bytes, model_revision, numerics FROM clips
        QUALIFY row_number() OVER (PARTITION BY id, fingerprint ORDER BY delivered_at DESC) = 1
        """
    ).to_arrow_table()


def failures(connection: Any) -> pa.Table:
    """id, fingerprint, number, reason of the latest attempt of each job that has no clip since."""
    return connection.sql(f"SELECT id, fingerprint, number, reason FROM ({_FAILED})").to_arrow_table()


def failed_jobs(connection: Any) -> pa.Table:
    """JOBS_SCHEMA and `reason`: the latest row of each job whose own latest attempt failed, as `failures`.

    A job that has since been planned with other settings is not among them.
    """
    table = connection.sql(
        f"""
        WITH failed AS ({_FAILED}),
        latest_jobs AS (
            SELECT jobs.* FROM jobs JOIN runs USING (run_id)
            WHERE jobs.state <> 'rejected' AND jobs.id IN (SELECT id FROM failed)
            QUALIFY row_number() OVER (PARTITION BY jobs.id ORDER BY runs.started_at DESC) = 1
        )
        SELECT jobs.* EXCLUDE (reason), failed.reason
        FROM latest_jobs AS jobs JOIN failed USING (id, fingerprint)
        ORDER BY jobs.file, jobs."row"
        """
    ).to_arrow_table()
    schema = JOBS_SCHEMA.append(pa.field("reason", pa.string()))
    for field in schema:
        if field.name not in table.column_names:  # the ledger is older than this column
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(schema.names).cast(schema)


def previous_settings(connection: Any, ids: pa.Array) -> pa.Table:
    """SETTING_COLUMNS of the latest delivered clip of each of `ids`; an id without one has no row."""
    connection.register("wanted", pa.table({"id": ids}))
    columns = ", ".join(f"jobs.{name}" for name in SETTING_COLUMNS)
    return connection.sql(
        f"""
        WITH delivered AS (
            SELECT run_id, id, fingerprint FROM clips SEMI JOIN wanted USING (id)
            QUALIFY row_number() OVER (PARTITION BY id ORDER BY delivered_at DESC) = 1
        )
        SELECT {columns} FROM jobs SEMI JOIN delivered USING (run_id, id, fingerprint)
        """
    ).to_arrow_table()


def last_gpu_name(connection: Any) -> str | None:
    """The card that rendered the latest batch, or was probed since."""
    found = connection.sql(
        """
        SELECT gpu_name FROM (
            SELECT gpu_name, started_at AS used_at FROM batches
            UNION ALL SELECT gpu_name, recorded_at FROM probes
        ) ORDER BY used_at DESC LIMIT 1
        """
    ).to_arrow_table()
    return found["gpu_name"][0].as_py() if found.num_rows else None


def caps(connection: Any, *, gpu_name: str, numerics: str) -> dict[str, int]:
    """Bucket key -> the lowest cap that running out of memory has left since the bucket's last probe, on
    this card with these numerics."""
    return _caps(
        connection,
        """
        SELECT bucket, min(mine.cap) AS cap FROM mine LEFT JOIN probed USING (bucket)
        WHERE source = 'out of memory' AND recorded_at > coalesce(probed_at, '-infinity'::TIMESTAMPTZ)
        GROUP BY bucket
        """,
        gpu_name=gpu_name,
        numerics=numerics,
    )


def probed_caps(connection: Any, *, gpu_name: str, numerics: str) -> dict[str, int]:
    """Bucket key -> the cap that its last probe chose on this card with these numerics."""
    return _caps(connection, "SELECT bucket, cap FROM probed", gpu_name=gpu_name, numerics=numerics)


def _caps(connection: Any, query: str, *, gpu_name: str, numerics: str) -> dict[str, int]:
    """bucket and cap of a query over `mine`, and over `probed`: the last probe of each bucket."""
    found = connection.sql(
        f"""
        WITH mine AS (FROM caps WHERE gpu_name = $gpu_name AND numerics = $numerics),
        probed AS (
            SELECT bucket, cap, recorded_at AS probed_at FROM mine WHERE source = 'probe'
            QUALIFY row_number() OVER (PARTITION BY bucket ORDER BY recorded_at DESC) = 1
        )
        {query}
        """,
        params={"gpu_name": gpu_name, "numerics": numerics},
    ).to_arrow_table()
    return dict(zip(found["bucket"].to_pylist(), found["cap"].to_pylist(), strict=True))


def bucket_times(connection: Any) -> dict[str, float]:
    """Bucket key -> median device seconds a slot of its done batches, whose size changes with the cap."""
    found = connection.sql(
        "SELECT bucket, median(device_s / size) AS slot_s FROM batches WHERE state = 'done' GROUP BY bucket"
    ).to_arrow_table()
    return dict(zip(found["bucket"].to_pylist(), found["slot_s"].to_pylist(), strict=True))


def pinned_revision(connection: Any, model: str) -> str | None:
    """The revision `model` had in the first run that planned with it, without that of LoRAs."""
    found = connection.sql(
        """
        SELECT split_part(jobs.model_revision, '+', 1) AS model_revision FROM jobs JOIN runs USING (run_id)
        WHERE jobs.model = $model ORDER BY runs.started_at LIMIT 1
        """,
        params={"model": model},
    ).to_arrow_table()
    return found["model_revision"][0].as_py() if found.num_rows else None
