"""From what a worker reports to what the ledger keeps: give whole files their final names, make the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from jobs.dispatch import Attempt, Settled
from jobs.messages import TaskResult
from manifests.errors import VideoError
from manifests.job import Bucket, Job
from storage.paths import clip_name, publish
from storage.rows import AttemptRow, BatchRow, CapRow, ClipRow, Outcome


@dataclass(frozen=True, kw_only=True)
class Context:
    """The same for every outcome of a run."""

    run_id: str
    folder: Path
    numerics: str


def conclude(result: TaskResult, settled: Settled, *, context: Context) -> Outcome:
    """Publish the delivered clips and make the rows; a file that cannot be published fails its job.

    The rename comes before the row, so a row never lacks its file; a kill between the two leaves a
    whole file that the next run adopts.
    """
    attempts = tuple(_publish(attempt, context=context) for attempt in settled.attempts)
    batch = result.task.batch
    return Outcome(
        batch=_batch_row(result, context=context),
        attempts=tuple(_attempt_row(attempt, result, context=context) for attempt in attempts),
        clips=tuple(
            _delivered_clip(attempt, result, context=context)
            for attempt in attempts
            if attempt.state == "delivered"
        ),
        caps=_cap_rows(batch.bucket, result, settled, context=context),
    )


def _publish(attempt: Attempt, *, context: Context) -> Attempt:
    if attempt.state != "delivered":
        return attempt
    assert attempt.result is not None
    assert attempt.result.partial is not None
    final = context.folder / clip_name(attempt.job.id, attempt.job.fingerprint)
    try:
        publish(attempt.result.partial, final)
    except VideoError as error:
        return replace(attempt, state="failed", reason=error.advice)
    return attempt


def _batch_row(result: TaskResult, *, context: Context) -> BatchRow:
    task, times = result.task, result.times
    batch, bucket = task.batch, task.batch.bucket
    return BatchRow(
        run_id=context.run_id,
        batch=batch.number,
        try_number=task.try_number,
        worker=result.worker,
        device=result.device,
        gpu_name=result.gpu_name,
        bucket=bucket.key,
        model=bucket.model,
        model_revision=bucket.revision,
        numerics=context.numerics,
        preset=bucket.preset,
        lora=bucket.lora,
        render_width=bucket.width,
        render_height=bucket.height,
        render_frames=bucket.num_frames,
        steps=bucket.steps,
        guidance_scale=bucket.guidance_scale,
        guidance_scale_2=bucket.guidance_scale_2,
        flow_shift=bucket.flow_shift,
        size=batch.size,
        cap=batch.cap,
        num_jobs=len(batch.jobs),
        state=result.state,
        started_at=result.started_at,
        load_s=times.load_s,
        encode_s=times.encode_s,
        denoise_s=times.denoise_s,
        decode_s=times.decode_s,
        write_s=result.write_s,
        device_s=result.device_s,
        peak_memory_bytes=result.peak_memory_bytes,
    )


def _attempt_row(attempt: Attempt, result: TaskResult, *, context: Context) -> AttemptRow:
    return AttemptRow(
        run_id=context.run_id,
        batch=result.task.batch.number,
        try_number=result.task.try_number,
        id=attempt.job.id,
        fingerprint=attempt.job.fingerprint,
        number=attempt.number,
        state=attempt.state,
        reason=attempt.reason,
        traceback=attempt.traceback,
        started_at=result.started_at,
        ended_at=result.ended_at,
        device_s=result.device_s / result.task.batch.size,
        write_s=attempt.result.write_s if attempt.result else 0.0,
    )


def _delivered_clip(attempt: Attempt, result: TaskResult, *, context: Context) -> ClipRow:
    assert attempt.result is not None
    batch = result.task.batch
    return clip_row(
        attempt.job,
        num_bytes=attempt.result.num_bytes,
        revision=batch.bucket.revision,
        context=context,
        batch=batch.number,
        cap=batch.cap,
        gpu_name=result.gpu_name,
    )


def clip_row(
    job: Job,
    *,
    num_bytes: int,
    revision: str,
    context: Context,
    batch: int | None = None,
    cap: int | None = None,
    gpu_name: str = "",
) -> ClipRow:
    """The row of a delivered file; without a batch, of one found whole on disk and adopted."""
    return ClipRow(
        run_id=context.run_id,
        batch=batch,
        id=job.id,
        fingerprint=job.fingerprint,
        file=clip_name(job.id, job.fingerprint),
        num_bytes=num_bytes,
        width=job.width,
        height=job.height,
        num_frames=job.num_frames,
        fps_num=job.fps.numerator,
        fps_den=job.fps.denominator,
        seed=job.seed,
        model=job.model,
        model_revision=revision,
        numerics=context.numerics,
        preset=job.preset,
        lora=job.lora,
        cap=cap,
        gpu_name=gpu_name,
        adopted=batch is None,
        delivered_at=datetime.now(UTC),
    )


def _cap_rows(
    bucket: Bucket, result: TaskResult, settled: Settled, *, context: Context
) -> tuple[CapRow, ...]:
    if settled.lowered_cap is None:
        return ()
    return (
        CapRow(
            bucket=bucket.key,
            gpu_name=result.gpu_name,
            numerics=context.numerics,
            cap=settled.lowered_cap,
            source="out of memory",
            recorded_at=result.ended_at,
        ),
    )
