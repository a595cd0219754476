"""Builders of ledger rows and plans, for the tests of storage."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from manifests.table import JOBS_SCHEMA, REJECTED_SCHEMA
from storage.ledger import Ledger
from storage.rows import AttemptRow, BatchRow, CapRow, ClipRow, Outcome, ProbeRow, RunRow, VerificationRow

NIGHT = datetime(2026, 11, 1, 5, 30, tzinfo=UTC)
PLAN_SCHEMA = JOBS_SCHEMA.append(pa.field("reason", pa.string()))


def at(seconds: float) -> datetime:
    return NIGHT + timedelta(seconds=seconds)


def fingerprint(id: str) -> str:
    return f"fingerprint of {id}"


def run_row(run_id: str = "r1", **changes: Any) -> RunRow:
    row = RunRow(
        run_id=run_id,
        started_at=at(0),
        heartbeat_at=at(0),
        ended_at=None,
        state="running",
        exit_code=None,
        manifest="night.parquet",
        out_dir="out",
        num_devices=1,
        device_s=0.0,
        host="farm",
        gpu_name="H200",
        versions={"vgbatch": "0.1.0", "torch": "2.13"},
        command="vgbatch run night.parquet",
        retry_of=None,
    )
    return replace(row, **changes)


def job(id: str, **changes: Any) -> dict[str, Any]:
    values = {
        "file": "night.parquet",
        "row": 0,
        "id": id,
        "fingerprint": fingerprint(id),
        "prompt": f"a clip of {id}",
        "negative_prompt": "",
        "width": 64,
        "height": 64,
        "num_frames": 5,
        "fps_num": 24000,
        "fps_den": 1001,
        "seed": 2**63 - 1,
        "steps": 4,
        "guidance_scale": 5.0,
        "guidance_scale_2": None,
        "flow_shift": 3.0,
        "preset": "exact",
        "model": "tiny",
        "model_revision": "rev1",
        "crf": 18,
        "encoder_preset": "medium",
        "lora": None,
        "render_width": 64,
        "render_height": 64,
        "render_frames": 5,
        "priority": 0,
        "price": Decimal("0.250000"),
        "warning": None,
        "tags": [("customer", "acme")],
        "reason": None,
    }
    return {**values, **changes}


def plan(*jobs: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist([{**one, "row": row} for row, one in enumerate(jobs)], schema=PLAN_SCHEMA)


def rejected(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=REJECTED_SCHEMA)


def outcome(id: str, *, state: str = "delivered", run_id: str = "r1", **changes: Any) -> Outcome:
    """One batch of one job. changes: batch, number, reason, seconds (when), device_s, fingerprint."""
    batch, number = changes.get("batch", 0), changes.get("number", 1)
    ended_at, device_s = at(changes.get("seconds", 10)), changes.get("device_s", 7.5)
    print_ = changes.get("fingerprint", fingerprint(id))
    batch_row = BatchRow(
        run_id=run_id,
        batch=batch,
        try_number=number,
        worker=0,
        device="cuda:0",
        gpu_name="H200",
        bucket="b64",
        model="tiny",
        model_revision="rev1",
        numerics="n1",
        preset="exact",
        render_width=64,
        render_height=64,
        render_frames=5,
        steps=4,
        guidance_scale=5.0,
        guidance_scale_2=None,
        flow_shift=3.0,
        size=1,
        cap=1,
        num_jobs=1,
        state={"delivered": "done"}.get(state, state),
        started_at=ended_at - timedelta(seconds=device_s),
        load_s=0.5,
        encode_s=0.1,
        denoise_s=6.0,
        decode_s=1.0,
        write_s=0.4,
        device_s=device_s,
        peak_memory_bytes=2**40,
    )
    attempt = AttemptRow(
        run_id=run_id,
        batch=batch,
        try_number=number,
        id=id,
        fingerprint=print_,
        number=number,
        state=state,
        reason=changes.get("reason"),
        traceback=None,
        started_at=ended_at - timedelta(seconds=device_s),
        ended_at=ended_at,
        device_s=device_s,
        write_s=0.4,
    )
    clips = (
        (clip(id, run_id=run_id, fingerprint=print_, delivered_at=ended_at),) if state == "delivered" else ()
    )
    return Outcome(batch=batch_row, attempts=(attempt,), clips=clips, caps=changes.get("caps", ()))


def clip(id: str, **changes: Any) -> ClipRow:
    row = ClipRow(
        run_id="r1",
        batch=0,
        id=id,
        fingerprint=fingerprint(id),
        file=f"{id}.mp4",
        num_bytes=1000,
        width=64,
        height=64,
        num_frames=5,
        fps_num=24000,
        fps_den=1001,
        seed=2**63 - 1,
        model="tiny",
        model_revision="rev1",
        numerics="n1",
        preset="exact",
        cap=1,
        gpu_name="H200",
        adopted=False,
        delivered_at=at(10),
    )
    return replace(row, **changes)


def cap_row(bucket: str, cap: int, **changes: Any) -> CapRow:
    row = CapRow(
        bucket=bucket, gpu_name="H200", numerics="n1", cap=cap, source="out of memory", recorded_at=at(5)
    )
    return replace(row, **changes)


def probe_row(bucket: str, **changes: Any) -> ProbeRow:
    row = ProbeRow(
        probe_id="p1",
        bucket=bucket,
        model="tiny",
        model_revision="rev1",
        preset="exact",
        render_width=64,
        render_height=64,
        render_frames=5,
        steps=4,
        guidance_scale=5.0,
        gpu_name="H200",
        numerics="n1",
        size=1,
        clip_step_s=0.25,
        peak_memory_bytes=2**40,
        recorded_at=at(5),
    )
    return replace(row, **changes)


def verification_row(**changes: Any) -> VerificationRow:
    row = VerificationRow(
        verification_id="v1",
        model="tiny",
        model_revision="rev1",
        lora=None,
        preset="fast",
        reference_model="tiny",
        reference_revision="rev1",
        reference_lora=None,
        reference_preset="exact",
        numerics="n1",
        gpu_name="H200",
        num_clips=600,
        passed=True,
        result='{"psnr_db": {"median": 31.5}}',
        verified_at=at(0),
    )
    return replace(row, **changes)


def start(
    ledger: Ledger,
    *ids: str,
    run_id: str = "r1",
    started: float = 0,
    retry_of: str | None = None,
    **tables: Any,
) -> None:
    """Starts a run that plans `ids`."""
    parts = {name: plan() for name in ("reused", "exhausted", "left_out")}
    row = run_row(run_id, started_at=at(started), heartbeat_at=at(started), retry_of=retry_of)
    ledger.start_run(row, **{"planned": plan(*map(job, ids)), **parts, "rejected": rejected(), **tables})


def new_ledger(folder: Path) -> Ledger:
    ledger = Ledger(folder / "vgbatch.duckdb")
    ledger.create()
    return ledger
