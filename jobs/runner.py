"""One run: lock, plan, render, record, sum up."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from jobs.config import Settings
from jobs.dispatch import Dispatcher
from jobs.executors.local import LocalExecutor
from jobs.lock import run_lock
from jobs.loop import RenderLoop, Tally
from jobs.meter import DeviceMeter
from jobs.models import Models
from jobs.outcomes import Context, clip_row
from jobs.prepare import MAX_ATTEMPTS, Planned, Selection, plan_reading
from jobs.progress import Eta, RunProgress
from jobs.stopping import Stop
from jobs.verification.unverified import Unverified
from jobs.worker import RendererFactory
from manifests.errors import LedgerError, RunError, UsageError, VgbatchError
from manifests.job import Weights
from manifests.planner import Plan
from manifests.reader import Reading
from manifests.table import job_from_row
from pipeline.config import NUMERICS, EmbeddingStore, EngineConfig, ModelSource
from pipeline.rendering import Renderer
from storage.clips import write_clips_parquet
from storage.embeddings import EmbeddingFolder
from storage.ffmpeg import require_encoder
from storage.filesystem import require_writable
from storage.ledger import Ledger
from storage.paths import remove_partials
from storage.rows import ClipRow, RunRow

_RECORDED_PACKAGES = (
    "vgbatch",
    "torch",
    "triton",
    "diffusers",
    "transformers",
    "fa3-fwd",
    "duckdb",
    "pyarrow",
    "imageio-ffmpeg",
)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a finished run says. elapsed_s: wall seconds from the lock to the last record.

    num_left: jobs that were neither delivered nor failed when the run stopped. listed: whether
    clips.parquet could be written.
    """

    run_id: str
    state: str
    exit_code: int
    num_planned: int
    num_delivered: int
    num_reused: int
    num_failed: int
    num_rejected: int
    num_exhausted: int
    num_left: int
    num_frames: int
    clip_s: float
    device_s: float
    elapsed_s: float
    out: Path
    ledger: Path
    stopped_by: str | None
    listed: bool


def run(
    reading: Reading,
    *,
    models: Models,
    settings: Settings,
    selection: Selection,
    manifest: str,
    command: str,
    console: Console,
    on_plan: Callable[[Planned], None] = lambda planned: None,
    factory: RendererFactory | None = None,
    retry_of: str | None = None,
    warns_of_unverified: bool = True,
) -> RunSummary:
    """Render what the manifest asks for and this ledger does not hold yet.

    on_plan: told the plan before anything is rendered. factory makes a worker's renderer; the engine
    unless given. retry_of: the run whose failed jobs `reading` holds; their tries are counted anew.
    warns_of_unverified: say which presets were never verified here.
    Raises UsageError for devices that are not there, Busy when another run is at work, RunError when this
    one cannot go on.
    """
    begin_s = time.monotonic()
    run_id = new_run_id()
    devices = choose_devices(settings)
    require_encoder()
    require_writable(settings.out)
    require_writable(settings.ledger.parent)
    with run_lock(out=settings.out, ledger=settings.ledger, run_id=run_id):
        remove_partials(settings.out)
        ledger = Ledger(settings.ledger)
        ledger.create()
        ledger.close_dead_runs(at=datetime.now(UTC))
        planned = plan_reading(
            reading,
            models=models,
            settings=settings,
            selection=selection,
            forget_failures=retry_of is not None,
        )
        on_plan(planned)
        context = Context(run_id=run_id, folder=settings.out, numerics=NUMERICS)
        row = _run_row(
            run_id,
            settings=settings,
            manifest=manifest,
            command=command,
            devices=devices,
            retry_of=retry_of,
        )
        _record_start(ledger, row, planned, context=context)
        stop, meter = Stop(), DeviceMeter(num_devices=len(devices))
        embeddings = EmbeddingFolder(settings.out, num_writers=len(devices))
        with _failure_recorded(ledger, run_id, meter=meter):
            tally = _render(
                planned,
                devices=devices,
                ledger=ledger,
                context=context,
                console=console,
                factory=factory or partial(build_renderer, models=models.sources(), embeddings=embeddings),
                stop=stop,
                meter=meter,
                unverified=Unverified(
                    planned.plan.buckets if warns_of_unverified else (), ledger=ledger, settings=settings
                ),
            )
        embeddings.trim()
        listed = _write_list(ledger, retry_of or run_id, settings=settings, console=console)
        ended = _End(stop, tally, planned.plan, listed)
        # What cannot be written now, the next run finds by itself: a run without an end, clips without rows.
        with suppress(LedgerError):
            ledger.end_run(
                run_id,
                ended_at=datetime.now(UTC),
                state=ended.state,
                exit_code=ended.exit_code,
                device_s=meter.device_s,
            )
        return _summary(
            ended,
            run_id=run_id,
            settings=settings,
            device_s=meter.device_s,
            elapsed_s=time.monotonic() - begin_s,
        )


@contextmanager
def _failure_recorded(ledger: Ledger, run_id: str, *, meter: DeviceMeter) -> Iterator[None]:
    """A run that breaks off is ended in the ledger as failed, with the device time it has used."""
    try:
        yield
    except Exception as error:
        with suppress(LedgerError):
            ledger.end_run(
                run_id, ended_at=datetime.now(UTC), state="failed", exit_code=1, device_s=meter.device_s
            )
        if isinstance(error, VgbatchError):
            raise RunError(f"the run ended early: {error.message}", hint=error.hint) from error
        raise


def _write_list(ledger: Ledger, run_id: str, *, settings: Settings, console: Console) -> bool:
    """clips.parquet. What is delivered stays delivered when it cannot be written."""
    try:
        write_clips_parquet(ledger.clips_table(run_id), settings.out)
    except LedgerError as error:
        text = f"warning: clips.parquet was not written: {error.advice}; the same command writes it"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return False
    return True


def new_run_id() -> str:
    """Sorts by time, and is unique between machines."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:6]}"


def build_renderer(
    device: str, *, models: Mapping[Weights, ModelSource], embeddings: EmbeddingStore
) -> Renderer:
    """The engine of one device; called inside a worker, so that only workers load models."""
    from pipeline.engine import build_engine

    return build_engine(EngineConfig(device=device, models=models, embeddings=embeddings))


def choose_devices(settings: Settings) -> tuple[str, ...]:
    """`auto`: every GPU of this host, else the CPU. Raises UsageError for cards that are not there."""
    wanted = tuple(settings.devices.split(","))
    if set(wanted) == {"cpu"}:  # each host has it, and looking for others would load torch
        return wanted
    from pipeline.devices import list_devices

    found = list_devices()
    if wanted == ("auto",):
        return found
    if missing := [device for device in wanted if device not in found]:
        cards = [device for device in found if device != "cpu"]
        raise UsageError(
            f"{settings.origins['devices']}: not on this machine: {', '.join(missing)}",
            hint=f"valid here: {', '.join(['auto', 'cpu', *cards])}; `vgbatch doctor` checks cards and torch",
        )
    return wanted


def _run_row(
    run_id: str,
    *,
    settings: Settings,
    manifest: str,
    command: str,
    devices: Sequence[str],
    retry_of: str | None,
) -> RunRow:
    now = datetime.now(UTC)
    return RunRow(
        run_id=run_id,
        started_at=now,
        heartbeat_at=now,
        ended_at=None,
        state="running",
        exit_code=None,
        manifest=manifest,
        out_dir=str(settings.out.resolve()),
        num_devices=len(devices),
        device_s=0.0,
        host=socket.gethostname(),
        gpu_name="",
        versions={"python": python_version(), **_package_versions()},
        command=command,
        retry_of=retry_of,
    )


def _package_versions() -> dict[str, str]:
    """Those that are there: some are optional."""
    known = {}
    for name in _RECORDED_PACKAGES:
        with suppress(PackageNotFoundError):
            known[name] = version(name)
    return known


def _record_start(ledger: Ledger, row: RunRow, planned: Planned, *, context: Context) -> None:
    plan = planned.plan
    ledger.start_run(
        row,
        planned=plan.jobs,
        reused=plan.reused.drop_columns(["clip"]),
        exhausted=plan.exhausted,
        left_out=plan.left_out,
        rejected=plan.rejected,
        adopted=_adopted(planned, context=context),
    )


def _adopted(planned: Planned, *, context: Context) -> list[ClipRow]:
    """Reused clips that a killed run renamed but did not come to record."""
    reused = planned.plan.reused
    found = pa.array(planned.found, type=pa.string())
    return [
        clip_row(
            job_from_row(row),
            num_bytes=(context.folder / row["clip"]).stat().st_size,
            revision=row["model_revision"],
            context=context,
        )
        for row in reused.filter(pc.is_in(reused["clip"], value_set=found)).to_pylist()
    ]


def _render(
    planned: Planned,
    *,
    devices: Sequence[str],
    ledger: Ledger,
    context: Context,
    console: Console,
    factory: RendererFactory,
    stop: Stop,
    meter: DeviceMeter,
    unverified: Unverified,
) -> Tally:
    """Render the plan: what came in."""
    plan = planned.plan
    if not plan.batches.num_rows:
        return Tally()
    eta = Eta(plan, earlier=planned.bucket_s, num_devices=len(devices))
    executor = LocalExecutor(devices, folder=context.folder, run_id=context.run_id, factory=factory)
    try:
        with RunProgress(console, num_jobs=plan.jobs.num_rows, eta=eta) as progress, stop.on_signals():
            loop = RenderLoop(
                dispatcher=Dispatcher(
                    plan,
                    earlier=planned.earlier_tries,
                    max_attempts=MAX_ATTEMPTS,
                    num_workers=len(devices),
                ),
                executor=executor,
                ledger=ledger,
                context=context,
                progress=progress,
                meter=meter,
                stop=stop,
                unverified=unverified,
            )
            loop.run()
    finally:
        executor.close()
    return loop.tally


@dataclass(frozen=True)
class _End:
    """How a run ended, from what came in and why it stopped."""

    stop: Stop
    tally: Tally
    plan: Plan
    listed: bool

    @property
    def num_left(self) -> int:
        return self.plan.jobs.num_rows - self.tally.num_delivered - self.tally.num_failed

    @property
    def stopped_by(self) -> str | None:
        """A signal that comes when nothing is left stops nothing; a full disk lost the last batch then."""
        return self.stop.reason if self.num_left or self.stop.signum is None else None

    @property
    def state(self) -> str:
        return "stopped" if self.stopped_by else "done"

    @property
    def exit_code(self) -> int:
        if self.num_left and self.stop.signum is not None:
            return 128 + self.stop.signum
        bad = self.tally.num_failed + self.plan.rejected.num_rows + self.plan.exhausted.num_rows
        return 3 if bad or self.stopped_by or not self.listed else 0


def _summary(end: _End, *, run_id: str, settings: Settings, device_s: float, elapsed_s: float) -> RunSummary:
    return RunSummary(
        run_id=run_id,
        state=end.state,
        exit_code=end.exit_code,
        num_planned=end.plan.jobs.num_rows,
        num_delivered=end.tally.num_delivered,
        num_reused=end.plan.reused.num_rows,
        num_failed=end.tally.num_failed,
        num_rejected=end.plan.rejected.num_rows,
        num_exhausted=end.plan.exhausted.num_rows,
        num_left=end.num_left,
        num_frames=end.tally.num_frames,
        clip_s=end.tally.clip_s,
        device_s=device_s,
        elapsed_s=elapsed_s,
        out=settings.out,
        ledger=settings.ledger,
        stopped_by=end.stopped_by,
        listed=end.listed,
    )
