"""Rows the parent writes to the ledger; field names are the column names, in their order."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One `vgbatch run`. Instants are UTC; device_s is devices held x first to last use, monotonic.

    state: running, done, stopped, failed, killed. A run still `running` when the next one starts was
    killed: it ended at its last heartbeat, with the device_s it had then. retry_of: the run whose failed
    jobs this one tried again.
    """

    run_id: str
    started_at: datetime
    heartbeat_at: datetime
    ended_at: datetime | None
    state: str
    exit_code: int | None
    manifest: str
    out_dir: str
    num_devices: int
    device_s: float
    host: str
    gpu_name: str
    versions: dict[str, str]
    command: str
    retry_of: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRow:
    """One try at one batch on one worker. device_s: seconds its devices were held for it, all of
    them together; load_s, which serves other batches too, is not in it. state: done, failed, lost, out of
    memory.
    """

    run_id: str
    batch: int
    try_number: int
    worker: int
    device: str
    gpu_name: str
    bucket: str
    model: str
    model_revision: str
    numerics: str
    preset: str
    render_width: int
    render_height: int
    render_frames: int
    steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    flow_shift: float
    size: int
    cap: int
    num_jobs: int
    state: str
    started_at: datetime
    load_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    write_s: float
    device_s: float
    peak_memory_bytes: int
    lora: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRow:
    """One try at one job. number counts from 1 for each id and fingerprint over all runs and
    starts again at 1 with `retry`. state: delivered, failed, lost. device_s: this job's equal share of its
    batch's device_s; the shares of padding belong to no job.
    """

    run_id: str
    batch: int
    try_number: int
    id: str
    fingerprint: str
    number: int
    state: str
    reason: str | None
    traceback: str | None
    started_at: datetime
    ended_at: datetime
    device_s: float
    write_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRow:
    """One delivered file. file: its name inside the output folder. adopted: found whole on disk
    after a crash rather than rendered by this run.
    """

    run_id: str
    batch: int | None
    id: str
    fingerprint: str
    file: str
    num_bytes: int
    width: int
    height: int
    num_frames: int
    fps_num: int
    fps_den: int
    seed: int
    model: str
    model_revision: str
    numerics: str
    preset: str
    cap: int | None
    gpu_name: str
    adopted: bool
    delivered_at: datetime
    lora: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CapRow:
    """The largest batch worth running for a bucket on a card. source: `probe`, which measured it, or
    `out of memory`, which lowers what was known before.
    """

    bucket: str
    gpu_name: str
    numerics: str
    cap: int
    source: str
    recorded_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRow:
    """One batch size that a probe tried. probe_id: of one `vgbatch probe`. clip_step_s: seconds a clip and
    denoising step, None where memory ran out. peak_memory_bytes: of the steps, 0 where it ran out.
    """

    probe_id: str
    bucket: str
    model: str
    model_revision: str
    preset: str
    render_width: int
    render_height: int
    render_frames: int
    steps: int
    guidance_scale: float
    gpu_name: str
    numerics: str
    size: int
    clip_step_s: float | None
    peak_memory_bytes: int
    recorded_at: datetime
    lora: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AliasRow:
    """One change of an alias; its latest row counts. target: `builtin`, a folder, or `org/name@commit`.
    revision: what target was then. action: add, promote, rollback. forced: promoted without having passed.
    """

    alias: str
    target: str
    revision: str
    action: str
    forced: bool
    recorded_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationRow:
    """One `vgbatch verify` that came to a verdict. reference_: what the model, LoRA and preset before it were
    compared with. num_clips: that were compared. result: its figures as JSON, without single clips.
    """

    verification_id: str
    model: str
    model_revision: str
    lora: str | None
    preset: str
    reference_model: str
    reference_revision: str
    reference_lora: str | None
    reference_preset: str
    numerics: str
    gpu_name: str
    num_clips: int
    passed: bool
    result: str
    verified_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one try at a batch gave: written to the ledger, or spooled, as one."""

    batch: BatchRow
    attempts: tuple[AttemptRow, ...]
    clips: tuple[ClipRow, ...]
    caps: tuple[CapRow, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunUpdate:
    """What a heartbeat or the end of a run changes in its row; None leaves the column as it is."""

    run_id: str
    device_s: float
    heartbeat_at: datetime | None = None
    ended_at: datetime | None = None
    state: str | None = None
    exit_code: int | None = None
    gpu_name: str | None = None
