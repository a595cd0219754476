"""The loop of a run: submit what there is room for, take what comes back, record it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from jobs.dispatch import Dispatcher, Settled
from jobs.executors.local import LocalExecutor
from jobs.messages import Message, TaskRendered, TaskResult, TaskStarted, WorkerGone, WorkerReady
from jobs.meter import DeviceMeter
from jobs.outcomes import Context, conclude
from jobs.progress import RunProgress
from jobs.stopping import Stop
from jobs.verification.unverified import Unverified
from manifests.errors import LedgerError
from storage.ledger import Ledger
from storage.rows import Outcome

POLL_S = 0.5
HEARTBEAT_EVERY_S = 30.0


@dataclass
class Tally:
    """What came in so far."""

    num_delivered: int = 0
    num_failed: int = 0
    num_frames: int = 0
    clip_s: float = 0.0

    def add(self, outcome: Outcome, *, num_failed: int) -> None:
        self.num_delivered += len(outcome.clips)
        self.num_failed += num_failed
        self.num_frames += sum(clip.num_frames for clip in outcome.clips)
        self.clip_s += sum(clip.num_frames * clip.fps_den / clip.fps_num for clip in outcome.clips)


@dataclass
class RenderLoop:
    """Everything a run's loop touches. run() returns when the plan is done or the run was stopped."""

    dispatcher: Dispatcher
    executor: LocalExecutor
    ledger: Ledger
    context: Context
    progress: RunProgress
    meter: DeviceMeter
    stop: Stop
    unverified: Unverified
    tally: Tally = field(default_factory=Tally)
    _draining: bool = False
    _last_beat_s: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        while not self.stop.at_once:
            self._submit()
            if self.dispatcher.done or (self.stop.requested and self.dispatcher.idle):
                return
            for message in self.executor.collect(timeout_s=POLL_S):
                self._take(message)
            if time.monotonic() - self._last_beat_s >= HEARTBEAT_EVERY_S:
                self._beat()
            self.progress.tick()

    def _submit(self) -> None:
        if self.stop.requested:
            self._drain_once()
            return
        while self.executor.has_room() and (task := self.dispatcher.next_task()):
            self.executor.submit(task)

    def _drain_once(self) -> None:
        if not self._draining:
            self._draining = True
            self.executor.drain()
            self.progress.say(
                f"stopping ({self.stop.reason}): batches on a device are finished first, "
                "a second signal stops at once"
            )

    def _take(self, message: Message) -> None:
        match message:
            case WorkerReady():
                self._beat()
                for text in self.unverified.warnings(message.gpu_name):
                    self.progress.say(text)
            case TaskStarted() | TaskRendered():
                self.meter.touch()
            case WorkerGone():
                self.progress.say(f"warning: {message.device} is left out: {message.reason}")
            case TaskResult():
                self._take_result(message)

    def _take_result(self, result: TaskResult) -> None:
        settled = self.dispatcher.settle(result)
        if result.state == "not started":
            return
        outcome = conclude(result, settled, context=self.context)
        self._record(outcome)
        num_unpublished = settled.num_delivered - len(outcome.clips)
        num_failed = settled.num_failed + num_unpublished
        self.tally.add(outcome, num_failed=num_failed)
        self.progress.note(result, outcome, num_failed=num_failed)
        self._tell(result, settled, outcome)
        if any(job.folder_failed for job in result.jobs):
            self.stop.request(f"no clip can be written to {self.context.folder}")

    def _record(self, outcome: Outcome) -> None:
        """A ledger that cannot be written, nor spooled beside, ends the run; its whole clips are adopted
        by the next one."""
        try:
            self.ledger.record([outcome])
        except LedgerError as error:
            self.stop.request("the ledger cannot be written")
            self.progress.say(f"warning: {error.message}")

    def _tell(self, result: TaskResult, settled: Settled, outcome: Outcome) -> None:
        if settled.again:
            jobs = "its job is" if len(outcome.attempts) == 1 else f"its {len(outcome.attempts)} jobs are"
            reason = _first_line(result.reason)
            self.progress.say(f"warning: batch {result.task.batch.number}: {reason}; {jobs} tried again")
            return
        # Where the folder is gone, the ledger that would keep the rest may be gone with it.
        is_all_kept = not any(job.folder_failed for job in result.jobs)
        for attempt in outcome.attempts:
            if attempt.state == "failed":
                reason = _first_line(attempt.reason) if is_all_kept else (attempt.reason or "")
                self.progress.say(f"failed: job {attempt.id!r}: {reason}")

    def _beat(self) -> None:
        """Say that this run lives: what a killed run has paid for ends at its last heartbeat."""
        self._last_beat_s = time.monotonic()
        self.meter.touch()
        # A missed heartbeat costs nothing while the run lives.
        with suppress(LedgerError):
            self.ledger.heartbeat(
                self.context.run_id,
                at=datetime.now(UTC),
                device_s=self.meter.device_s,
                gpu_name=self.executor.gpu_name,
            )


def _first_line(reason: str | None) -> str:
    return (reason or "no reason given").strip().splitlines()[0]
