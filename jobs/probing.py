"""`vgbatch probe`: how fast batches of each size are on this machine, and from which size on no faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from rich.console import Console

from jobs.config import Settings
from jobs.executors.local import LocalExecutor
from jobs.lock import run_lock
from jobs.messages import Task, TaskResult
from jobs.models import Models
from jobs.runner import choose_devices, new_run_id
from jobs.stopping import Stop
from jobs.terminal import line
from jobs.worker import RendererFactory
from manifests.job import Batch, Bucket, Weights
from manifests.packing import PROBE
from pipeline.config import NUMERICS, EngineConfig, ModelSource
from pipeline.memory.caps import PROBED_SIZES, measured_cap, still_rising
from pipeline.rendering import Prober, Renderer, Rendering, StageTimes
from storage.filesystem import require_writable
from storage.ledger import Ledger
from storage.rows import CapRow, ProbeRow

POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class BucketProbe:
    """What came of one bucket. rows: the sizes that were tried. cap: the one chosen, None with a reason."""

    bucket: Bucket
    rows: tuple[ProbeRow, ...]
    cap: int | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a probe gave. gpu_name: None when there was nothing to do. num_left: buckets without a verdict
    when it was stopped. stopped_by: the signal's name."""

    probe_id: str
    gpu_name: str | None
    buckets: tuple[BucketProbe, ...]
    num_left: int
    stopped_by: str | None
    exit_code: int


def probe(
    find_buckets: Callable[[], Sequence[Bucket]],
    *,
    models: Models,
    settings: Settings,
    console: Console,
    factory: RendererFactory | None = None,
) -> Probe:
    """Measure buckets on the first device, one after another, and record what each batch size takes.

    find_buckets: called under the lock, when the ledger is there. models: theirs. factory: makes the
    worker's StepTimer, over the engine unless given.
    Raises UsageError for devices that are not there, Busy when a run is at work here, RunError when the
    device does not start.
    """
    probe_id = new_run_id()
    device = choose_devices(settings)[0]
    require_writable(settings.out)
    require_writable(settings.ledger.parent)
    with run_lock(out=settings.out, ledger=settings.ledger, run_id=probe_id):
        ledger = Ledger(settings.ledger)
        ledger.create()
        buckets = find_buckets()
        stop = Stop()
        if not buckets:
            return _ended(probe_id, buckets, [], stop=stop, gpu_name=None)
        factory = factory or partial(build_step_timer, models=models.sources())
        executor = LocalExecutor((device,), folder=settings.out, run_id=probe_id, factory=factory)
        try:
            with stop.on_signals():
                session = _Session(
                    executor=executor, ledger=ledger, stop=stop, console=console, probe_id=probe_id
                )
                probed = session.probe(buckets)
        finally:
            executor.close()
        return _ended(probe_id, buckets, probed, stop=stop, gpu_name=executor.gpu_name)


def _ended(
    probe_id: str,
    buckets: Sequence[Bucket],
    probed: Sequence[BucketProbe],
    *,
    stop: Stop,
    gpu_name: str | None,
) -> Probe:
    num_left = len(buckets) - len(probed)
    failed = any(one.cap is None for one in probed)
    return Probe(
        probe_id=probe_id,
        gpu_name=gpu_name,
        buckets=tuple(probed),
        num_left=num_left,
        stopped_by=stop.reason if num_left else None,
        exit_code=128 + stop.signum if num_left and stop.signum is not None else 3 if failed else 0,
    )


@dataclass(kw_only=True)
class _Session:
    """A worker, and where what it says goes."""

    executor: LocalExecutor
    ledger: Ledger
    stop: Stop
    console: Console
    probe_id: str
    _numbers: Iterator[int] = field(default_factory=count)

    def probe(self, buckets: Sequence[Bucket]) -> list[BucketProbe]:
        """One after another, until stopped; a signal ends the one at hand as well."""
        probed: list[BucketProbe] = []
        for bucket in buckets:
            found = self._probe(bucket)
            if found is None:
                break
            probed.append(found)
        return probed

    def _probe(self, bucket: Bucket) -> BucketProbe | None:
        """Rising sizes, until more clips at once gain nothing or do not fit; None when stopped."""
        rows: list[ProbeRow] = []
        for size in PROBED_SIZES:
            result = self._measure(bucket, size)
            if result is None:
                return None
            if result.state not in ("done", "out of memory"):
                return self._failed(bucket, rows, f"{size} at once: {_first_line(result.reason)}")
            rows.append(_probe_row(result, probe_id=self.probe_id))
            self.ledger.add_probes(rows[-1:])
            self._tell(rows[-1], bucket)
            if rows[-1].clip_step_s is None or not still_rising(_clip_step_s(rows)):
                break
        if not _clip_step_s(rows):
            reason = "memory runs out with a single clip; ask for a smaller size or fewer frames"
            return self._failed(bucket, rows, reason)
        cap = measured_cap(_clip_step_s(rows))
        self.ledger.add_probes([], caps=[_cap_row(rows[-1], cap)])
        return BucketProbe(bucket=bucket, rows=tuple(rows), cap=cap)

    def _measure(self, bucket: Bucket, size: int) -> TaskResult | None:
        """What the worker says of one size; None when stopped."""
        batch = Batch(number=next(self._numbers), bucket=bucket, jobs=(), size=size, cap=size)
        is_out = False
        while not self.stop.requested:
            if not is_out and self.executor.has_room():
                self.executor.submit(Task(batch=batch, try_number=1))
                is_out = True
            for message in self.executor.collect(timeout_s=POLL_S):
                if isinstance(message, TaskResult):
                    if message.state != "not started":
                        return message
                    is_out = False  # its worker died before; another one is being started
        return None

    def _failed(self, bucket: Bucket, rows: Sequence[ProbeRow], reason: str) -> BucketProbe:
        line(self.console, f"failed: {bucket.label}: {reason}")
        return BucketProbe(bucket=bucket, rows=tuple(rows), cap=None, reason=reason)

    def _tell(self, row: ProbeRow, bucket: Bucket) -> None:
        if row.clip_step_s is None:
            said = "out of memory"
        else:
            said = f"{row.clip_step_s:.4g} s a clip and step, {row.peak_memory_bytes / 2**30:.1f} GiB"
        line(self.console, f"{bucket.label}: {row.size} at once: {said}")


def _probe_row(result: TaskResult, *, probe_id: str) -> ProbeRow:
    batch, bucket = result.task.batch, result.task.batch.bucket
    fits = result.state == "done"
    return ProbeRow(
        probe_id=probe_id,
        bucket=bucket.key,
        model=bucket.model,
        model_revision=bucket.revision,
        preset=bucket.preset,
        lora=bucket.lora,
        render_width=bucket.width,
        render_height=bucket.height,
        render_frames=bucket.num_frames,
        steps=bucket.steps,
        guidance_scale=bucket.guidance_scale,
        gpu_name=result.gpu_name,
        numerics=NUMERICS,
        size=batch.size,
        clip_step_s=result.times.denoise_s / batch.size if fits else None,
        peak_memory_bytes=result.peak_memory_bytes,
        recorded_at=result.ended_at,
    )


def _clip_step_s(rows: Sequence[ProbeRow]) -> dict[int, float]:
    """By size, of those that fit."""
    return {row.size: row.clip_step_s for row in rows if row.clip_step_s is not None}


def _cap_row(row: ProbeRow, cap: int) -> CapRow:
    """row: of the bucket's last size."""
    return CapRow(
        bucket=row.bucket,
        gpu_name=row.gpu_name,
        numerics=row.numerics,
        cap=cap,
        source=PROBE,
        recorded_at=row.recorded_at,
    )


def _first_line(reason: str | None) -> str:
    return (reason or "no reason given").strip().splitlines()[0]


# ---- in the worker ----------------------------------------------------------------------------------


class StepTimer:
    """A Renderer of batches without jobs, which are padding alone: it renders no clip, and its denoise_s
    is one step's."""

    def __init__(self, engine: Prober) -> None:
        self.gpu_name = engine.gpu_name
        self._engine = engine

    def encode(self, bucket: Bucket, texts: Sequence[str]) -> None:
        raise AssertionError("a batch without jobs has no prompts")

    def render(self, batch: Batch) -> Rendering:
        assert not batch.jobs, batch
        measured = self._engine.probe(batch.bucket, size=batch.size)
        times = StageTimes(denoise_s=measured.step_s)
        return Rendering(clips=(), times=times, peak_memory_bytes=measured.peak_memory_bytes)


def build_step_timer(device: str, *, models: Mapping[Weights, ModelSource]) -> Renderer:
    """Over the engine of one device; called inside the worker, as only workers load models."""
    from pipeline.engine import build_engine

    return StepTimer(build_engine(EngineConfig(device=device, models=models)))
