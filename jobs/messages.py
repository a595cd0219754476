"""What the parent and a worker say to each other; small, picklable, no frames."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from manifests.job import Batch
from pipeline.rendering import StageTimes


@dataclass(frozen=True, kw_only=True)
class Task:
    """One try at one batch. try_number counts from 1 for each batch number.

    texts: prompts of this and later batches for the worker to encode first.
    """

    batch: Batch
    try_number: int
    texts: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        return (self.batch.number, self.try_number)


@dataclass(frozen=True, kw_only=True)
class WorkerReady:
    """The worker has its renderer. startup_s: from spawning to now."""

    gpu_name: str
    startup_s: float


@dataclass(frozen=True, kw_only=True)
class TaskStarted:
    key: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class TaskRendered:
    """The device is free for the next task; this one's frames are being written."""

    key: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """partial: a verified file, fsynced, waiting for its final name. None: the job failed.

    folder_failed: because the output folder is full or gone, which is not the job's fault.
    """

    id: str
    partial: Path | None
    num_bytes: int = 0
    write_s: float = 0.0
    reason: str | None = None
    traceback: str | None = None
    folder_failed: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """How a try ended.

    state: done (look at each job), failed, lost, out of memory.

    counted: whether the try counts against its jobs; not when the worker died of another task.
    replace_worker: the worker's device may be poisoned; nothing more is to be sent to it.
    retry_alone: the failure may be one job's; worth trying the jobs one by one.
    """

    task: Task
    state: str
    jobs: tuple[JobResult, ...]
    worker: int
    device: str
    gpu_name: str
    started_at: datetime
    ended_at: datetime
    times: StageTimes
    device_s: float
    write_s: float
    peak_memory_bytes: int
    reason: str | None = None
    traceback: str | None = None
    counted: bool = True
    replace_worker: bool = False
    retry_alone: bool = False


def blank_result(task: Task, *, worker: int, device: str, gpu_name: str) -> TaskResult:
    """A task that was not begun: the start of every other result."""
    now = datetime.now(UTC)
    return TaskResult(
        task=task,
        state="not started",
        jobs=(),
        worker=worker,
        device=device,
        gpu_name=gpu_name,
        started_at=now,
        ended_at=now,
        times=StageTimes(),
        device_s=0.0,
        write_s=0.0,
        peak_memory_bytes=0,
    )


@dataclass(frozen=True, kw_only=True)
class WorkerGone:
    """A device whose worker never got ready; the run goes on without it."""

    device: str
    reason: str


# The parent to a worker: begin nothing more.
DRAIN = "drain"

Message = WorkerReady | TaskStarted | TaskRendered | TaskResult | WorkerGone
