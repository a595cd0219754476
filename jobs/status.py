"""`vgbatch status`: what the ledger says of the last run, or of one job."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from jobs.config import Settings
from jobs.terminal import line
from jobs.views import MAX_ROWS_SHOWN, show_mapping
from manifests.errors import UsageError
from manifests.wording import counted
from storage.ledger import Ledger

# As `run` says it.
_STATUS_WORDS = {"exhausted": "given up"}


def run_status(settings: Settings) -> dict[str, Any]:
    """The last run with its counts, and the jobs that failed and are not delivered yet."""
    ledger = Ledger(settings.ledger)
    last = ledger.last_run()
    if last is None:
        return {"run": None, "counts": {}, "failed_jobs": [], "rejected_rows": []}
    failed = ledger.failed_jobs().select(["id", "reason"])
    return {
        "run": last,
        "counts": ledger.counts(last["run_id"]),
        "failed_jobs": failed.to_pylist(),
        "rejected_rows": ledger.rejected_rows(last["run_id"]).to_pylist(),
    }


def job_facts(id: str, settings: Settings) -> dict[str, Any]:
    """Settings, state, attempts and clip of one job; UsageError for an id the ledger does not have."""
    facts = Ledger(settings.ledger).job(id)
    if facts is None:
        raise UsageError(
            f"no such job in {settings.ledger}: {id}",
            hint="ids are compared exactly; `clips.parquet` lists those of the last manifest",
        )
    return facts


def show_status(facts: dict[str, Any], console: Console) -> None:
    """For people."""
    run = facts["run"]
    if run is None:
        console.print("no run yet")
        return
    shown = ("run_id", "state", "exit_code", "manifest", "started_at", "ended_at", "gpu_name", "num_devices")
    show_mapping({name: run[name] for name in shown}, console)
    console.print()
    show_mapping({_STATUS_WORDS.get(name, name): count for name, count in facts["counts"].items()}, console)
    for what, rows in (("failed", facts["failed_jobs"]), ("rejected", facts["rejected_rows"])):
        for row in rows[:MAX_ROWS_SHOWN]:
            where = repr(row["id"]) if row["id"] is not None else f"{row['file']} row {row['row']}"
            line(console, f"{what}: {where}: {row['reason'].splitlines()[0]}")
        if len(rows) > MAX_ROWS_SHOWN:
            line(
                console, f"{what}: {len(rows) - MAX_ROWS_SHOWN} more, all of them in `vgbatch status --json`"
            )


def _says_something(value: object) -> bool:
    return value is not None and value not in ("", {}, [])


def show_job(facts: dict[str, Any], console: Console) -> None:
    """For people: the job's settings, then each attempt, then its clip."""
    attempts = facts["attempts"]
    clip = facts["clip"]
    shown = {name: facts[name] for name in ("id", "status", "reason", "run_id")}
    show_mapping(
        {**shown, **{name: value for name, value in facts["settings"].items() if _says_something(value)}},
        console,
    )
    for attempt in attempts:
        reason = f": {attempt['reason']}" if attempt["reason"] else ""
        line(
            console,
            f"attempt {attempt['number']} in run {attempt['run_id']}: {attempt['state']}, "
            f"{attempt['device_s']:.2f} s{reason}",
        )
        if attempt["traceback"]:
            line(console, attempt["traceback"].rstrip())
    if clip is not None:
        frames = counted(clip["num_frames"], "frame")
        line(console, f"clip {clip['file']}, {clip['num_bytes']} bytes, {frames}")
