"""How long `vgbatch plan` takes on a million rows, and how much memory: `python bench/plan_million.py`.

Three whole processes, imports included: nothing delivered yet; every clip delivered and its file there;
every clip delivered and then every prompt changed. Target on two cores: 20 s and 1.5 GB for the first two;
the third has none.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.config import Settings, resolve
from jobs.models import Models
from jobs.prepare import Selection, plan_reading, read
from storage.ledger import Ledger
from storage.paths import clip_name
from storage.rows import RunRow

NUM_ROWS = 1_000_000
PROMPT_BYTES = 200
SIZES = [(64, 64), (96, 64), (64, 96), (128, 96)]
MAX_S = 20.0
MAX_RSS_BYTES = 1_500_000_000


def write_manifest(path: Path, *, filler: str) -> None:
    """Distinct prompts, sizes in turn, a tag and a price; seeds are left to be derived."""
    prompts = [f"{filler * 4}{index:09d}"[-PROMPT_BYTES:] for index in range(NUM_ROWS)]
    turn = np.arange(NUM_ROWS) % len(SIZES)
    customers = pa.array([f"customer-{index}" for index in range(100)])
    table = pa.table(
        {
            "id": pa.array([f"clip-{index}" for index in range(NUM_ROWS)]),
            "prompt": prompts,
            "width": pa.array(np.array([width for width, _ in SIZES])[turn]),
            "height": pa.array(np.array([height for _, height in SIZES])[turn]),
            "customer": customers.take(pa.array(np.arange(NUM_ROWS) % 100)),
            "price": pa.array(np.full(NUM_ROWS, 0.25)),
        }
    )
    pq.write_table(table, path)


def deliver_all(manifest: Path, settings: Settings) -> None:
    """A ledger in which every job of the manifest has its clip, and an output folder with their names."""
    reading, models = read(str(manifest), settings=settings)
    plan = _plan(reading, models, settings)
    ledger = Ledger(settings.ledger)
    ledger.create()
    none = plan.jobs.slice(0, 0)
    ledger.start_run(
        _run_row(manifest, settings),
        planned=plan.jobs,
        reused=none,
        exhausted=none,
        left_out=none,
        rejected=reading.rejected,
    )
    identities = zip(plan.jobs["id"].to_pylist(), plan.jobs["fingerprint"].to_pylist(), strict=True)
    names = [clip_name(*identity) for identity in identities]
    for name in names:
        os.close(os.open(settings.out / name, os.O_CREAT | os.O_WRONLY))
    files = pa.table({"id": plan.jobs["id"], "file": names})
    with duckdb.connect(str(settings.ledger)) as connection:
        connection.register("files", files)
        connection.execute(
            """
            INSERT INTO clips BY NAME
            SELECT run_id, 0 AS batch, id, fingerprint, files.file, 0 AS num_bytes, width, height, num_frames,
                fps_num, fps_den, seed, model, model_revision, 'exact-1' AS numerics, preset, 8 AS cap,
                'card' AS gpu_name, false AS adopted, now() AS delivered_at
            FROM jobs JOIN files USING (id)
            """
        )


def _plan(reading: Any, models: Models, settings: Settings) -> Any:
    return plan_reading(reading, models=models, settings=settings, selection=Selection()).plan


def _run_row(manifest: Path, settings: Settings) -> RunRow:
    now = datetime.now(UTC)
    return RunRow(
        run_id="bench",
        started_at=now,
        heartbeat_at=now,
        ended_at=now,
        state="done",
        exit_code=0,
        manifest=str(manifest),
        out_dir=str(settings.out),
        num_devices=1,
        device_s=1.0,
        host="bench",
        gpu_name="card",
        versions={},
        command="bench",
        retry_of=None,
    )


def measure(manifest: Path, out: Path) -> dict[str, Any]:
    """One `vgbatch plan` as a whole process: its facts, wall seconds and peak resident bytes."""
    command = [sys.executable, "-m", "vgbatch", "plan", str(manifest), "--out", str(out), "--json"]
    begin_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.monotonic() - begin_s
        assert status == 0, status
        output.seek(0)
        facts = json.load(output)
    return {
        "wall_s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "rss_bytes": usage.ru_maxrss * 1024,
        **facts,
    }


def prepare(folder: Path) -> None:
    """The two manifests, and the ledger of a night that delivered all of the first."""
    write_manifest(
        folder / "first.parquet", filler="a red kite over a slate sea at dusk, slow pan, film grain, "
    )
    write_manifest(
        folder / "changed.parquet", filler="a paper boat in a gutter after rain, close up, slow, grain, "
    )
    (folder / "full").mkdir()
    deliver_all(folder / "first.parquet", resolve({"out": folder / "full"}, environ={}, folder=folder))


def main() -> int:
    met = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In a process of its own: a child's peak memory starts from that of the process that forked it.
        preparation = multiprocessing.get_context("spawn").Process(target=prepare, args=(folder,))
        preparation.start()
        preparation.join()
        assert preparation.exitcode == 0
        cases = (
            ("nothing delivered", "first.parquet", "empty"),
            ("all delivered", "first.parquet", "full"),
            ("all changed", "changed.parquet", "full"),
        )
        for title, manifest, out in cases:
            facts = measure(folder / manifest, folder / out)
            if title != "all changed":
                met &= facts["wall_s"] <= MAX_S and facts["rss_bytes"] <= MAX_RSS_BYTES
            print(
                f"{title}: {facts['wall_s']:.1f} s ({facts['cpu_s']:.1f} s of CPU), "
                f"{facts['rss_bytes'] / 1e9:.2f} GB, {facts['to_render']} to render in {facts['batches']} "
                f"batches, {facts['reused']} reused"
            )
    print("target met" if met else f"target missed: {MAX_S:g} s and {MAX_RSS_BYTES / 1e9:g} GB")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
