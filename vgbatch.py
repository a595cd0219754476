"""The public Python API, and `python -m vgbatch`.

    import vgbatch

    if __name__ == "__main__":  # workers are spawned, and import this file again
        summary = vgbatch.run("manifest.parquet", out="clips")
        print(vgbatch.report(out="clips", gpu_price="2.5").total.full_load)

Settings are those of the command line, by name: `out`, `ledger`, `model`, `preset`, `crf`,
`encoder_preset`, `strict`, `tags`, `devices`, `gpu_price`, `price_per_video`, `price_per_second`,
`utilization`, `tz`. What is not given comes from `VGBATCH_*`, then `vgbatch.toml`, then the default.
Every function raises `VgbatchError` for what a user can cause.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.cli import main
from manifests.errors import VgbatchError

if TYPE_CHECKING:
    from cost.report import Report
    from jobs.config import Settings
    from jobs.runner import RunSummary
    from manifests.planner import Plan

__all__ = ["VgbatchError", "main", "plan", "report", "run"]


def plan(manifest: str | Path, **settings: object) -> Plan:
    """What `run` would render, reuse and reject. Writes nothing, uses no device."""
    from jobs.prepare import Selection, plan_reading, read

    resolved = _settings(settings)
    reading, models = read(str(manifest), settings=resolved)
    return plan_reading(reading, models=models, settings=resolved, selection=Selection()).plan


def run(manifest: str | Path, **settings: object) -> RunSummary:
    """Render a manifest. Needs `if __name__ == "__main__":` around it, since workers are spawned."""
    from rich.console import Console

    from jobs.prepare import Selection, read
    from jobs.runner import run as run_reading

    resolved = _settings(settings)
    reading, models = read(str(manifest), settings=resolved)
    return run_reading(
        reading,
        models=models,
        settings=resolved,
        selection=Selection(),
        manifest=str(manifest),
        command="vgbatch.run",
        console=Console(quiet=True),
    )


def report(
    *, by: str | None = None, since: str | None = None, until: str | None = None, **settings: object
) -> Report:
    """What the clips of a ledger cost and earned.

    by: bucket, model, day, run or a tag. since, until: dates or instants, as on the command line.
    """
    from jobs.reporting import make_report

    return make_report(_settings(settings), by=by, since=since, until=until)


def _settings(given: dict[str, object]) -> Settings:
    from jobs.config import SETTING_NAMES, resolve

    for name in given.keys() - SETTING_NAMES:
        raise VgbatchError(f"not a setting: {name}", hint=f"settings: {', '.join(sorted(SETTING_NAMES))}")
    return resolve(given, environ=os.environ, folder=Path.cwd())


if __name__ == "__main__":
    main()
