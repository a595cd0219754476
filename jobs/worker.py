"""A worker: one process, one device. Renders batch N+1 while the clips of batch N are encoded."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

from jobs.messages import (
    DRAIN,
    JobResult,
    Message,
    Task,
    TaskRendered,
    TaskResult,
    TaskStarted,
    WorkerReady,
    blank_result,
)
from manifests.errors import JobError, OutOfDeviceMemory, OutOfSpace, VgbatchError
from manifests.job import Job
from manifests.wording import counted
from pipeline.rendering import RenderedClip, Renderer, Rendering, StageTimes
from storage.paths import clip_name, partial_name
from storage.video import ClipMetadata, VideoSettings, encode_clip

RendererFactory = Callable[[str], Renderer]

# One batch may wait, rendered, while the one before it is encoded: a slow encoder then slows the
# run, it never fills memory.
MAX_WAITING_BATCHES = 1


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker is told once. factory makes the renderer for `device` inside the process.
    spawned_s: when it was spawned, on the monotonic clock."""

    index: int
    device: str
    folder: Path
    run_id: str
    factory: RendererFactory
    num_encoders: int
    spawned_s: float


def work(spec: WorkerSpec, connection: Connection) -> None:
    """The worker process: runs until the parent closes the pipe."""
    _detach()
    inbox = _Inbox(connection)
    renderer = spec.factory(spec.device)
    # The monotonic clock is the same in every process of a host.
    startup_s = time.monotonic() - spec.spawned_s
    outbox = _Outbox(connection)
    outbox.send(WorkerReady(gpu_name=renderer.gpu_name, startup_s=startup_s))
    writer = _Writer(spec, renderer.gpu_name, outbox)
    # What the start took is paid device time, and belongs to loading.
    unaccounted_load_s = startup_s
    while True:
        task = inbox.get()
        blank = blank_result(task, worker=spec.index, device=spec.device, gpu_name=renderer.gpu_name)
        if inbox.draining:
            outbox.send(blank)
            continue
        outbox.send(TaskStarted(key=task.key))
        rendered = _render(renderer, blank, earlier_load_s=unaccounted_load_s)
        unaccounted_load_s = 0.0
        writer.put(rendered)
        outbox.send(TaskRendered(key=task.key))
        if rendered.result.replace_worker:
            writer.drain()
            return


def _detach() -> None:
    # Ctrl-C reaches every process of the terminal's foreground group; in a session of its own neither
    # the worker nor its ffmpeg children see it, and the parent decides what is finished.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _Inbox:
    """Tasks from the parent, received by a thread of its own. draining: begin none of them."""

    def __init__(self, connection: Connection) -> None:
        self.draining = False
        self._connection = connection
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def get(self) -> Task:
        return self._tasks.get()

    def _receive(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                if message == DRAIN:
                    self.draining = True
                else:
                    self._tasks.put(message)
        except (EOFError, OSError):
            # The parent is gone or done with us. Exit at once, from this thread, whatever the device does.
            os._exit(0)


class _Outbox:
    """Sends from two threads, one message at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        with self._lock:
            self._connection.send(message)


@dataclass(frozen=True, kw_only=True)
class _Rendered:
    """A result whose jobs are still to be written, with the frames to write."""

    result: TaskResult
    clips: tuple[RenderedClip, ...]


def _render(renderer: Renderer, blank: TaskResult, *, earlier_load_s: float) -> _Rendered:
    task = blank.task
    if task.texts:
        # It serves many batches and is none's own: it belongs to loading, as the worker's start does.
        earlier_load_s += _encode(renderer, task)
    begin_s = time.monotonic()
    try:
        rendering = renderer.render(task.batch)
    except Exception as error:
        held_s = time.monotonic() - begin_s
        times = StageTimes(load_s=earlier_load_s)
        return _Rendered(result=_failure(replace(blank, device_s=held_s, times=times), error), clips=())
    elapsed_s = time.monotonic() - begin_s
    _check_complete(task, rendering)
    times = rendering.times
    return _Rendered(
        result=replace(
            blank,
            state="done",
            times=replace(times, load_s=times.load_s + earlier_load_s),
            device_s=max(0.0, elapsed_s - times.load_s),
            peak_memory_bytes=rendering.peak_memory_bytes,
        ),
        clips=rendering.clips,
    )


def _encode(renderer: Renderer, task: Task) -> float:
    """Seconds it took. A failure is not this batch's: each batch encodes for itself what is missing."""
    begin_s = time.monotonic()
    try:
        renderer.encode(task.batch.bucket, task.texts)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        prompts = counted(len(task.texts), "prompt")
        print(f"warning: {prompts} could not be encoded ahead: {reason}", file=sys.stderr)
    return time.monotonic() - begin_s


def _check_complete(task: Task, rendering: Rendering) -> None:
    wanted = [job.id for job in task.batch.jobs]
    assert [clip.job_id for clip in rendering.clips] == wanted, "a rendering holds one clip for each job"


def _failure(result: TaskResult, error: Exception) -> TaskResult:
    """What a raised error says about the batch, and about the worker that raised it."""
    if isinstance(error, OutOfDeviceMemory):
        return replace(result, state="out of memory", reason=error.advice)
    if isinstance(error, VgbatchError):
        alone = isinstance(error, JobError)
        return replace(result, state="failed", reason=error.advice, retry_alone=alone)
    # Not one of ours: after a device error every later call in this process may fail as well.
    reason = f"{type(error).__name__}: {error}".strip()
    return replace(
        result,
        state="failed",
        reason=reason,
        traceback=traceback.format_exc(),
        replace_worker=True,
        retry_alone=True,
    )


class _Writer:
    """Encodes rendered batches in the background and sends each result when its clips are verified."""

    def __init__(self, spec: WorkerSpec, gpu_name: str, outbox: _Outbox) -> None:
        self._spec = spec
        self._outbox = outbox
        self._queue: queue.Queue[_Rendered] = queue.Queue(maxsize=MAX_WAITING_BATCHES)
        # Threads live as long as the worker: a child's parent-death signal follows the thread that
        # started it.
        self._encoders = ThreadPoolExecutor(spec.num_encoders, thread_name_prefix="encode")
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, rendered: _Rendered) -> None:
        self._queue.put(rendered)

    def drain(self) -> None:
        self._queue.join()

    def _run(self) -> None:
        while True:
            rendered = self._queue.get()
            self._outbox.send(self._write(rendered))
            self._queue.task_done()

    def _write(self, rendered: _Rendered) -> TaskResult:
        begin_s = time.monotonic()
        jobs = rendered.result.task.batch.jobs
        results = tuple(self._encoders.map(self._write_clip, jobs, rendered.clips)) if rendered.clips else ()
        write_s = time.monotonic() - begin_s if rendered.clips else 0.0
        return replace(rendered.result, jobs=results, write_s=write_s, ended_at=datetime.now(UTC))

    def _write_clip(self, job: Job, clip: RenderedClip) -> JobResult:
        if clip.frames is None:
            assert clip.error is not None
            return self._not_written(job, clip.error)
        name = clip_name(job.id, job.fingerprint)
        partial = self._spec.folder / partial_name(name, run_id=self._spec.run_id)
        try:
            encoded = encode_clip(
                clip.frames,
                settings=VideoSettings.of(job),
                metadata=ClipMetadata(id=job.id, fingerprint=job.fingerprint, seed=job.seed, model=job.model),
                partial=partial,
            )
        except JobError as error:
            return self._not_written(job, error)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return JobResult(id=job.id, partial=None, reason=reason, traceback=traceback.format_exc())
        return JobResult(id=job.id, partial=partial, num_bytes=encoded.num_bytes, write_s=encoded.write_s)

    def _not_written(self, job: Job, error: JobError) -> JobResult:
        folder = self._spec.folder
        if isinstance(error, OutOfSpace):
            trouble = f"no space left in {folder}"
        elif not folder.is_dir():
            trouble = f"no longer a folder: {folder}"
        else:
            return JobResult(id=job.id, partial=None, reason=error.advice)
        return JobResult(id=job.id, partial=None, reason=f"{trouble}\n{error.message}", folder_failed=True)
