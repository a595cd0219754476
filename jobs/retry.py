"""What `vgbatch retry` runs: the failed jobs of this ledger, as they were planned."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from jobs.config import Settings
from jobs.models import Models
from jobs.prepare import find_models
from manifests.job import Weights
from manifests.presets import TURBO
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
    models = find_models(settings)
    reading = Reading(
        jobs=_with_present_revisions(failed.select(JOBS_SCHEMA.names).cast(JOBS_SCHEMA), models),
        rejected=REJECTED_SCHEMA.empty_table(),
        notes=(),
    )
    return Failed(reading=reading, models=models, run_id=last["run_id"], manifest=last["manifest"])


def _with_present_revisions(jobs: pa.Table, models: Models) -> pa.Table:
    """An alias may have moved since these jobs were planned: they get what it stands for now."""
    asked = zip(*(jobs[name].to_pylist() for name in ("model", "lora", "preset")), strict=True)
    revisions = [models.spec(Weights(model, lora, preset == TURBO)).revision for model, lora, preset in asked]
    place = jobs.schema.get_field_index("model_revision")
    return jobs.set_column(place, jobs.schema.field(place), pa.array(revisions, pa.string()))
