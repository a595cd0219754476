"""What `vgbatch retry` runs: the failed jobs of this ledger, as they were planned."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.config import Settings
from jobs.models import Models
from manifests.reader import Reading
from manifests.table import JOBS_SCHEMA, REJECTED_SCHEMA
from storage.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Failed:
    """run_id, manifest: of the last run that read a manifest; its list of clips is brought up to date."""

    reading: Reading
    models: Models
    run_id: str
    manifest: str


def read_failed(settings: Settings) -> Failed | None:
    """The failed jobs, or None when there are none. LedgerError without a ledger."""
    ledger = Ledger(settings.ledger)
    failed = ledger.failed_jobs()
    if not failed.num_rows:
        return None
    last = ledger.last_run(of_manifest=True)
    assert last is not None, "a failed job belongs to a run"
    models = Models(aliases=settings.aliases, pinned=ledger.pinned_revision)
    for name in failed["model"].unique().to_pylist():
        models.spec(name)
    reading = Reading(
        jobs=failed.select(JOBS_SCHEMA.names).cast(JOBS_SCHEMA),
        rejected=REJECTED_SCHEMA.empty_table(),
        notes=(),
    )
    return Failed(reading=reading, models=models, run_id=last["run_id"], manifest=last["manifest"])
