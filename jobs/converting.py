"""`vgbatch manifest from-csv` and `from-jsonl`: a manifest, and what a run would reject of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from jobs.config import Settings
from jobs.prepare import find_models, read_settings
from jobs.views import rejected_facts
from manifests.templates import convert_csv, convert_jsonl


def convert(
    kind: Literal["csv", "jsonl"], source: Path, target: Path, *, settings: Settings, overwrite: bool
) -> dict[str, Any]:
    """Write `target`; every row of `source` goes in, what would be rejected comes back."""
    write = convert_csv if kind == "csv" else convert_jsonl
    models = find_models(settings)
    reading = write(
        str(source),
        str(target),
        settings=read_settings(settings),
        model_spec=models.spec,
        overwrite=overwrite,
    )
    return {
        "manifest": str(target),
        "rows": reading.jobs.num_rows + reading.rejected.num_rows,
        "rejected": reading.rejected.num_rows,
        "rejected_rows": rejected_facts(reading.rejected),
        "notes": list(reading.notes),
    }
