"""Runs with the fake engine, as tests need them: rows in, summary, files and ledger out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from jobs.config import Settings, resolve
from jobs.prepare import Planned, Selection, plan_reading, read
from jobs.runner import RunSummary, run
from tests.fake_engine import Knobs

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent


def rows_of(*ids: str, **columns: Any) -> list[Row]:
    """Small jobs: 64x64, 5 frames, prompt and seed of their own."""
    return [
        {"id": id, "prompt": f"prompt {id}", "seed": n, "width": 64, "height": 64, "num_frames": 5, **columns}
        for n, id in enumerate(ids)
    ]


def write_manifest(folder: Path, rows: Sequence[Row] | pa.Table, name: str = "manifest.parquet") -> Path:
    """A row without a column that another one has gets a null there."""
    path = folder / name
    if not isinstance(rows, pa.Table):
        columns = dict.fromkeys(column for row in rows for column in row)
        rows = pa.table({column: [row.get(column) for row in rows] for column in columns})
    pq.write_table(rows, path)
    return path


def settings_for(folder: Path, **flags: object) -> Settings:
    return resolve(
        {"out": folder / "out", "devices": "cpu", "encoder_preset": "ultrafast", **flags},
        environ={},
        folder=folder,
    )


def render(
    folder: Path,
    rows: Sequence[Row] | pa.Table,
    *,
    knobs: Knobs | None = None,
    selection: Selection | None = None,
    console: Console | None = None,
    **flags: object,
) -> RunSummary:
    """One whole run in this process, its workers spawned."""
    settings = settings_for(folder, **flags)
    manifest = write_manifest(folder, rows)
    reading, models = read(str(manifest), settings=settings)
    return run(
        reading,
        models=models,
        settings=settings,
        selection=selection or Selection(),
        manifest=str(manifest),
        command="vgbatch run",
        console=console or Console(quiet=True),
        factory=(knobs or Knobs()).renderer(),
    )


def planned(folder: Path, rows: Sequence[Row] | pa.Table, **flags: object) -> Planned:
    settings = settings_for(folder, **flags)
    reading, models = read(str(write_manifest(folder, rows)), settings=settings)
    return plan_reading(reading, models=models, settings=settings, selection=Selection())


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with duckdb.connect(str(folder / "out" / "vgbatch.duckdb"), read_only=True) as connection:
        return connection.execute(sql).fetchall()


def clips_list(folder: Path) -> dict[str, Row]:
    """clips.parquet by id."""
    return {row["id"]: row for row in pq.read_table(folder / "out" / "clips.parquet").to_pylist()}


def mp4s(folder: Path) -> list[Path]:
    return sorted((folder / "out").glob("*.mp4"))


def leftovers(folder: Path) -> list[str]:
    """Files in the output folder that are neither clips nor vgbatch's own."""
    own = {"vgbatch.duckdb", "vgbatch.duckdb.lock", ".vgbatch.lock", "clips.parquet"}
    return sorted(p.name for p in (folder / "out").iterdir() if p.suffix != ".mp4" and p.name not in own)


def command(*args: str, folder: Path, knobs: str = "Knobs()", **environ: str) -> subprocess.Popen[str]:
    """`vgbatch ARGS` in a process of its own, in `folder`. knobs of its fake engine: a Python expression."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fake_vgbatch", *args],
        cwd=folder,
        # Looking for devices would import torch.
        env={**os.environ, "PYTHONPATH": str(ROOT), "FAKE_KNOBS": knobs, "VGBATCH_DEVICES": "cpu", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
