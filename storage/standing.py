"""What people and the next step of a pipeline ask a ledger that is open: how far, which, why."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

# The plan decides what is rejected or reused; what became of the other jobs is in the clips and attempts
# of the run and of its retries.
_STATUS = """
    WITH these_runs AS (SELECT run_id FROM runs WHERE run_id = $run_id OR retry_of = $run_id),
    delivered AS (SELECT id, fingerprint FROM clips SEMI JOIN these_runs USING (run_id)),
    tried AS (
        SELECT id, fingerprint, state, reason FROM attempts SEMI JOIN these_runs USING (run_id)
        -- Most jobs succeed at once: sorting those too takes seconds at a million jobs.
        WHERE fingerprint IN (SELECT fingerprint FROM attempts WHERE state <> 'delivered')
        QUALIFY row_number() OVER (PARTITION BY id, fingerprint ORDER BY ended_at DESC, number DESC) = 1
    ),
    mine AS (
        SELECT *, EXISTS (
            FROM delivered WHERE delivered.id = jobs.id AND delivered.fingerprint = jobs.fingerprint
        ) AS is_delivered
        FROM jobs WHERE run_id = $run_id
    )
    SELECT mine.* EXCLUDE (is_delivered),
        CASE
            WHEN mine.state IN ('reused', 'rejected') THEN mine.state
            WHEN is_delivered THEN 'delivered'
            WHEN tried.state IN ('failed', 'lost') THEN 'failed'
            WHEN mine.state = 'exhausted' THEN 'exhausted'
            ELSE 'pending'
        END AS status,
        CASE status
            WHEN 'failed' THEN tried.reason
            WHEN 'delivered' THEN NULL
            WHEN 'pending' THEN NULL
            ELSE mine.reason
        END AS status_reason
    FROM mine LEFT JOIN tried ON mine.id = tried.id AND mine.fingerprint = tried.fingerprint
"""
STATUSES = ("delivered", "reused", "failed", "rejected", "exhausted", "pending")


def last_run(connection: Any, *, of_manifest: bool) -> dict[str, Any] | None:
    """The row of the run that started last; of_manifest: retries, which read none, left out."""
    wanted = "WHERE retry_of IS NULL" if of_manifest else ""
    found = _rows(connection, f"FROM runs {wanted} ORDER BY started_at DESC LIMIT 1", {})
    return {**found[0], "versions": dict(found[0]["versions"] or [])} if found else None


def counts(connection: Any, run_id: str) -> dict[str, int]:
    """How many jobs of a run are `planned`, and how many stand at each of STATUSES.

    delivered + failed + pending = planned. failed: its latest attempt in this run or a retry of it failed
    or was lost. pending: not tried yet, also because --limit or --select left it out.
    """
    found = connection.sql(
        f"SELECT status, count(*) AS num_jobs FROM ({_STATUS}) GROUP BY status", params={"run_id": run_id}
    ).to_arrow_table()
    by_status = dict(zip(found["status"].to_pylist(), found["num_jobs"].to_pylist(), strict=True))
    standing = {status: by_status.get(status, 0) for status in STATUSES}
    planned = standing["delivered"] + standing["failed"] + standing["pending"]
    return {"planned": planned, **standing}


def job(connection: Any, id: str) -> dict[str, Any] | None:
    """All about one job: `run_id`, `status` and `reason` in the last run that knew it, its `settings` there,
    every one of its `attempts` in any run, oldest first, and the latest `clip` of those settings or None.
    """
    parameters = {"id": id}
    found = _rows(
        connection,
        "SELECT run_id FROM jobs JOIN runs USING (run_id) WHERE id = $id ORDER BY started_at DESC LIMIT 1",
        parameters,
    )
    if not found:
        return None
    run_id = found[0]["run_id"]
    settings = _rows(connection, f"FROM ({_STATUS}) WHERE id = $id", {**parameters, "run_id": run_id})[0]
    clips = _rows(
        connection,
        "FROM clips WHERE id = $id AND fingerprint = $fingerprint ORDER BY delivered_at DESC LIMIT 1",
        {**parameters, "fingerprint": settings["fingerprint"]},
    )
    return {
        "id": id,
        "run_id": settings.pop("run_id"),
        "status": settings.pop("status"),
        "reason": settings.pop("status_reason"),
        "settings": {
            name: value for name, value in settings.items() if name not in ("id", "state", "reason")
        },
        "attempts": _rows(connection, "FROM attempts WHERE id = $id ORDER BY ended_at, number", parameters),
        "clip": clips[0] if clips else None,
    }


def rejected_rows(connection: Any, run_id: str) -> pa.Table:
    """file, row, id, reason, tags of the rows of a run's manifest that could not run."""
    return connection.sql(
        """
        SELECT file, "row", id, reason, tags FROM jobs
        WHERE run_id = $run_id AND state = 'rejected' ORDER BY file, "row"
        """,
        params={"run_id": run_id},
    ).to_arrow_table()


def clips_table(connection: Any, run_id: str) -> pa.Table:
    """One row for each job of a run's manifest, in its order.

    path: file name inside the output folder, of a delivered or reused job. attempts, seconds: tries at
    this job and the device seconds they took, over all runs. fps: frames per second, rounded to a float.
    """
    return connection.sql(
        f"""
        WITH standing AS ({_STATUS}),
        latest_clips AS (
            SELECT id, fingerprint, file FROM clips
            QUALIFY row_number() OVER (PARTITION BY id, fingerprint ORDER BY delivered_at DESC) = 1
        ),
        effort AS (
            SELECT id, fingerprint, count(*)::INTEGER AS attempts, sum(device_s) AS seconds
            FROM attempts GROUP BY id, fingerprint
        )
        SELECT standing.id, status,
            CASE WHEN status IN ('delivered', 'reused') THEN latest_clips.file END AS path,
            status_reason AS reason, seed, width, height, num_frames,
            fps_num / fps_den AS fps, num_frames * fps_den / fps_num AS duration_s,
            coalesce(effort.attempts, 0) AS attempts, coalesce(effort.seconds, 0) AS seconds,
            "row", standing.file, tags
        FROM standing
        LEFT JOIN latest_clips
            ON standing.id = latest_clips.id AND standing.fingerprint = latest_clips.fingerprint
        LEFT JOIN effort ON standing.id = effort.id AND standing.fingerprint = effort.fingerprint
        ORDER BY standing.file, "row"
        """,
        params={"run_id": run_id},
    ).to_arrow_table()


def _rows(connection: Any, query: str, parameters: dict[str, str]) -> list[dict[str, Any]]:
    rows = connection.sql(query, params=parameters).to_arrow_table().to_pylist()
    return [{**row, "tags": dict(row["tags"] or [])} if "tags" in row else row for row in rows]
