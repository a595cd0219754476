"""The ledger's tables as Arrow, made from rows the way the ledger itself would hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import duckdb
import pyarrow as pa

from storage.migrations import MIGRATIONS
from storage.rows import AttemptRow, BatchRow, ClipRow, RunRow

START = datetime(2026, 11, 1, 5, 30, tzinfo=UTC)

RUN = RunRow(
    run_id="r1",
    started_at=START,
    heartbeat_at=START,
    ended_at=None,
    state="done",
    exit_code=0,
    manifest="m.parquet",
    out_dir="out",
    num_devices=1,
    device_s=0.0,
    host="farm",
    gpu_name="H200",
    versions={"vgbatch": "0.1.0"},
    command="vgbatch run m.parquet",
    retry_of=None,
)
BATCH = BatchRow(
    run_id="r1",
    batch=0,
    try_number=1,
    worker=0,
    device="cuda:0",
    gpu_name="H200",
    bucket="b0",
    model="builtin",
    model_revision="c0ffee",
    numerics="1",
    preset="exact",
    render_width=832,
    render_height=480,
    render_frames=81,
    steps=50,
    guidance_scale=5.0,
    guidance_scale_2=None,
    flow_shift=3.0,
    size=4,
    cap=4,
    num_jobs=4,
    state="done",
    started_at=START,
    load_s=0.0,
    encode_s=0.0,
    denoise_s=0.0,
    decode_s=0.0,
    write_s=0.0,
    device_s=40.0,
    peak_memory_bytes=0,
)
ATTEMPT = AttemptRow(
    run_id="r1",
    batch=0,
    try_number=1,
    id="a",
    fingerprint="fa",
    number=1,
    state="delivered",
    reason=None,
    traceback=None,
    started_at=START,
    ended_at=START,
    device_s=10.0,
    write_s=0.0,
)
CLIP = ClipRow(
    run_id="r1",
    batch=0,
    id="a",
    fingerprint="fa",
    file="a.mp4",
    num_bytes=1,
    width=832,
    height=480,
    num_frames=80,
    fps_num=16,
    fps_den=1,
    seed=1,
    model="builtin",
    model_revision="c0ffee",
    numerics="1",
    preset="exact",
    cap=4,
    gpu_name="H200",
    adopted=False,
    delivered_at=START,
)


class LedgerBuilder:
    """Collects rows, then gives the tables. A try at a batch brings its attempts and clips along."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Any]] = {"runs": [], "batches": [], "attempts": [], "clips": []}
        self._jobs: list[dict[str, Any]] = []

    def run(self, run_id: str = "r1", **values: Any) -> None:
        self._rows["runs"].append(replace(RUN, run_id=run_id, **values))

    def job(self, id: str, *, run_id: str = "r1", **values: Any) -> None:
        self._jobs.append(
            {"run_id": run_id, "id": id, "fingerprint": f"f{id}", "file": "m", "row": 0, **values}
        )

    def clip(self, id: str, **values: Any) -> None:
        self._rows["clips"].append(replace(CLIP, id=id, **{"fingerprint": f"f{id}", **values}))

    def batch(self, delivered: str = "", *, failed: str = "", lost: str = "", **values: Any) -> None:
        """delivered, failed, lost: ids of one letter each; size and num_jobs default to their number."""
        num_jobs = len(delivered + failed + lost)
        row = replace(BATCH, **{"size": num_jobs, "num_jobs": num_jobs, **values})
        self._rows["batches"].append(row)
        key = {name: getattr(row, name) for name in ("run_id", "batch", "try_number")}
        for state, ids in (("delivered", delivered), ("failed", failed), ("lost", lost)):
            for id in ids:
                attempt = replace(
                    ATTEMPT,
                    id=id,
                    fingerprint=f"f{id}",
                    state=state,
                    started_at=row.started_at,
                    ended_at=row.started_at + timedelta(seconds=row.device_s),
                    device_s=row.device_s / row.size,
                    **key,
                )
                self._rows["attempts"].append(attempt)
                if state == "delivered":
                    self.clip(
                        id,
                        run_id=row.run_id,
                        batch=row.batch,
                        model=row.model,
                        preset=row.preset,
                        delivered_at=attempt.ended_at,
                    )

    def tables(self) -> dict[str, pa.Table]:
        with duckdb.connect() as connection:
            connection.execute("SET TimeZone = 'UTC'")
            for migrate in MIGRATIONS:
                migrate(connection)
            for name, rows in self._rows.items():
                _insert(connection, name, rows)
            for job in self._jobs:
                columns = ", ".join(f'"{column}"' for column in job)
                marks = ", ".join("?" for _ in job)
                connection.execute(f"INSERT INTO jobs ({columns}) VALUES ({marks})", list(job.values()))
            names = ("runs", "jobs", "batches", "attempts", "clips")
            return {name: connection.sql(f"FROM {name}").to_arrow_table() for name in names}


def _insert(connection: Any, name: str, rows: Sequence[Any]) -> None:
    if rows:
        columns = ", ".join(field.name for field in fields(rows[0]))
        marks = ", ".join("?" for _ in fields(rows[0]))
        connection.executemany(
            f"INSERT INTO {name} ({columns}) VALUES ({marks})", [astuple(row) for row in rows]
        )
