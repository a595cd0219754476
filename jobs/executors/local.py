"""Workers on this host: one spawned process for each device."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from jobs.messages import (
    DRAIN,
    Message,
    Task,
    TaskRendered,
    TaskResult,
    TaskStarted,
    WorkerGone,
    WorkerReady,
    blank_result,
)
from jobs.worker import RendererFactory, WorkerSpec, work
from manifests.errors import RunError

# Tasks not yet rendered: one on the device and one at hand, so that the device never waits for us.
TASKS_IN_HAND = 2
MAX_FAILED_STARTS = 3


@dataclass
class _Slot:
    """A device and the process that serves it now."""

    index: int
    device: str
    process: SpawnProcess
    connection: Connection
    gpu_name: str = ""
    ready: bool = False
    retiring: bool = False
    failed_starts: int = 0
    tasks: dict[tuple[int, int], Task] = field(default_factory=dict)
    started_s: dict[tuple[int, int], float] = field(default_factory=dict)
    rendered_s: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def num_unrendered(self) -> int:
        return len(self.tasks) - len(self.rendered_s)


class LocalExecutor:
    """Submit a batch, collect what came of it. A dead process's tasks come back as lost."""

    def __init__(
        self, devices: Sequence[str], *, folder: Path, run_id: str, factory: RendererFactory
    ) -> None:
        assert devices
        self._context = multiprocessing.get_context("spawn")
        self._folder = folder
        self._run_id = run_id
        self._factory = factory
        self._num_encoders = max(1, min(4, (os.cpu_count() or 1) // len(devices)))
        self._slots = [self._start(index, device) for index, device in enumerate(devices)]

    @property
    def num_devices(self) -> int:
        return len(self._slots)

    @property
    def gpu_name(self) -> str:
        """The first device's name, once a worker has said it."""
        return next((slot.gpu_name for slot in self._slots if slot.gpu_name), "")

    def has_room(self) -> bool:
        return any(self._room(slot) for slot in self._slots)

    def submit(self, task: Task) -> None:
        """Hand a task to the device that has least to do. Needs has_room()."""
        slot = min((slot for slot in self._slots if self._room(slot)), key=lambda slot: slot.num_unrendered)
        slot.tasks[task.key] = task
        # When the process has just died, collect() sees the closed pipe and gives the task back.
        with suppress(OSError):
            slot.connection.send(task)

    def collect(self, *, timeout_s: float) -> list[Message]:
        """What workers said within timeout_s: starts, renderings, and the results of tasks."""
        by_connection = {slot.connection: slot for slot in self._slots}
        messages: list[Message] = []
        for ready in wait(list(by_connection), timeout=timeout_s):
            slot = by_connection[ready]  # type: ignore[index]  # wait() gives back what it was given
            try:
                message: Message = slot.connection.recv()
            except (EOFError, OSError):
                messages.extend(self._bury(slot))
                continue
            self._note(slot, message)
            messages.append(message)
        return messages

    def drain(self) -> None:
        """Take back what no worker has begun: it comes from collect() as not started."""
        for slot in self._slots:
            with suppress(OSError):
                slot.connection.send(DRAIN)

    def close(self) -> None:
        """End every worker at once; what they have not finished is dropped."""
        for slot in self._slots:
            slot.connection.close()
        for slot in self._slots:
            slot.process.join(timeout=5)
            if slot.process.is_alive():
                slot.process.kill()
                slot.process.join()

    def _start(self, index: int, device: str) -> _Slot:
        ours, theirs = self._context.Pipe()
        spec = WorkerSpec(
            index=index,
            device=device,
            folder=self._folder,
            run_id=self._run_id,
            factory=self._factory,
            num_encoders=self._num_encoders,
            spawned_s=time.monotonic(),
        )
        process = self._context.Process(
            target=work, args=(spec, theirs), name=f"vgbatch-{index}", daemon=True
        )
        process.start()
        # Only the child may hold its end: a copy kept here would hide its death from us.
        theirs.close()
        return _Slot(index=index, device=device, process=process, connection=ours)

    @staticmethod
    def _room(slot: _Slot) -> bool:
        return not slot.retiring and slot.num_unrendered < TASKS_IN_HAND

    @staticmethod
    def _note(slot: _Slot, message: Message) -> None:
        match message:
            case WorkerReady():
                slot.ready = True
                slot.gpu_name = message.gpu_name
                slot.failed_starts = 0
            case TaskStarted():
                slot.started_s[message.key] = time.monotonic()
            case TaskRendered():
                slot.rendered_s[message.key] = time.monotonic()
            case TaskResult():
                key = message.task.key
                del slot.tasks[key]
                slot.started_s.pop(key, None)
                slot.rendered_s.pop(key, None)
                slot.retiring = slot.retiring or message.replace_worker

    def _bury(self, slot: _Slot) -> list[Message]:
        """Give back a dead process's tasks and start another in its place."""
        slot.connection.close()
        slot.process.join()
        messages: list[Message] = [self._lost(slot, task) for task in slot.tasks.values()]
        failed_starts = 0 if slot.ready else slot.failed_starts + 1
        if failed_starts >= MAX_FAILED_STARTS:
            return [*messages, self._give_up(slot)]
        fresh = self._start(slot.index, slot.device)
        fresh.failed_starts = failed_starts
        fresh.gpu_name = slot.gpu_name
        self._slots[self._slots.index(slot)] = fresh
        return messages

    def _give_up(self, slot: _Slot) -> WorkerGone:
        self._slots.remove(slot)
        reason = (
            f"its worker ended {MAX_FAILED_STARTS} times before it was ready ({_how(slot.process.exitcode)})"
        )
        if not self._slots:
            raise RunError(
                f"no device left to render on; {slot.device}: {reason}",
                hint="the worker's own error is printed above; `vgbatch doctor` checks devices and packages",
            )
        return WorkerGone(device=slot.device, reason=reason)

    @staticmethod
    def _lost(slot: _Slot, task: Task) -> TaskResult:
        """A task of a dead process. What was on the device is held to have killed it; frames that were
        being written only when nothing was on the device."""
        blank = blank_result(task, worker=slot.index, device=slot.device, gpu_name=slot.gpu_name)
        started_s = slot.started_s.get(task.key)
        if started_s is None:
            return blank
        held_s = slot.rendered_s.get(task.key, time.monotonic()) - started_s
        on_device = slot.started_s.keys() - slot.rendered_s.keys()
        return replace(
            blank,
            state="lost",
            started_at=blank.ended_at - timedelta(seconds=time.monotonic() - started_s),
            device_s=held_s,
            reason=f"the worker process died ({_how(slot.process.exitcode)})",
            counted=not on_device or task.key in on_device,
        )


def _how(exitcode: int | None) -> str:
    if exitcode is None:
        return "still running"
    return f"signal {-exitcode}" if exitcode < 0 else f"exit code {exitcode}"
