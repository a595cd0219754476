"""Which task goes next, and what a result means for the jobs in it. No processes, no files, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from jobs.ahead import TextsAhead
from jobs.messages import JobResult, Task, TaskResult
from manifests.job import Batch, Job
from manifests.planner import Plan


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What a result says of one job. number: counted tries of it, this one included;
    a batch that did not fit in memory, or a clip that did not fit on the disk, is nobody's fault and
    is not counted."""

    job: Job
    state: str
    number: int
    result: JobResult | None
    reason: str | None
    traceback: str | None


@dataclass(frozen=True, kw_only=True)
class Settled:
    """attempts: to be recorded. again: this run tries their jobs once more. num_failed: jobs it will
    not try again. lowered_cap: of the batch's bucket, when memory ran out."""

    attempts: tuple[Attempt, ...]
    again: bool = False
    num_failed: int = 0
    lowered_cap: int | None = None

    @property
    def num_delivered(self) -> int:
        return sum(attempt.state == "delivered" for attempt in self.attempts)


class Dispatcher:
    """Hands out a plan's batches in order, retries first.

    earlier: counted failed tries from earlier runs, by id and fingerprint.
    A job that fails by itself is left for the next run. One whose batch failed or whose worker died
    is tried again: the batch once more when the worker died, then each of its jobs alone, still at the
    batch's static size so that its pixels stay the same, step caching apart. Tries of one job end at
    max_attempts.
    """

    def __init__(
        self, plan: Plan, *, earlier: Mapping[tuple[str, str], int], max_attempts: int, num_workers: int
    ) -> None:
        self._plan = plan
        self._ahead = TextsAhead(plan, num_workers=num_workers)
        self._num_begun = 0
        self._again: deque[Task] = deque()
        self._numbers = dict(earlier)
        self._max_attempts = max_attempts
        self._caps: dict[str, int] = {}
        self._lost_once: set[int] = set()
        self._next_number = plan.batches.num_rows
        self._in_flight = 0

    @property
    def idle(self) -> bool:
        """No task is out."""
        return self._in_flight == 0

    @property
    def done(self) -> bool:
        """No task is out and none is left."""
        return self.idle and not self._again and self._num_begun == self._plan.batches.num_rows

    def next_task(self) -> Task | None:
        """The next task to submit, or None when there is none now."""
        if not self._again:
            if self._num_begun == self._plan.batches.num_rows:
                return None
            batch, texts = self._plan.batch(self._num_begun), self._ahead.share(self._num_begun)
            self._num_begun += 1
            self._again.extend(self._within_cap(Task(batch=batch, try_number=1, texts=texts)))
        self._in_flight += 1
        return self._again.popleft()

    def settle(self, result: TaskResult) -> Settled:
        """Take a result back: what to record, and (inside) what to try again."""
        self._in_flight -= 1
        match result.state:
            case "done":
                return self._settle_done(result)
            case "not started":
                self._again.appendleft(result.task)
                return Settled(attempts=(), again=True)
            case "out of memory":
                return self._settle_out_of_memory(result)
            case "lost":
                return self._settle_lost(result)
            case state:
                assert state == "failed", state
                return self._settle_failed(result)

    def _settle_done(self, result: TaskResult) -> Settled:
        attempts = [
            self._attempt_done(job, job_result)
            for job, job_result in zip(result.task.batch.jobs, result.jobs, strict=True)
        ]
        failed = sum(attempt.state == "failed" for attempt in attempts)
        return Settled(attempts=tuple(attempts), num_failed=failed)

    def _attempt_done(self, job: Job, job_result: JobResult) -> Attempt:
        # A folder that is full or gone is nobody's fault: the next run finds all of the job's tries left.
        counted = not job_result.folder_failed
        return Attempt(
            job=job,
            state="failed" if job_result.partial is None else "delivered",
            number=self._count(job) if counted else self._numbers.get((job.id, job.fingerprint), 0),
            result=job_result,
            reason=job_result.reason,
            traceback=job_result.traceback,
        )

    def _settle_out_of_memory(self, result: TaskResult) -> Settled:
        batch = result.task.batch
        if batch.size == 1:
            return Settled(attempts=self._attempts(result, "failed"), num_failed=len(batch.jobs))
        cap = largest_power_of_two_below(batch.size)
        self._caps[batch.bucket.key] = cap
        self._again.extendleft(reversed(list(self._within_cap(result.task))))
        return Settled(attempts=self._attempts(result, "lost", counted=False), again=True, lowered_cap=cap)

    def _settle_lost(self, result: TaskResult) -> Settled:
        task = result.task
        if not result.counted:
            self._again.appendleft(replace(task, try_number=task.try_number + 1))
            return Settled(attempts=self._attempts(result, "lost", counted=False), again=True)
        if len(task.batch.jobs) > 1:
            attempts = self._attempts(result, "lost")
            if task.batch.number in self._lost_once:
                self._again.extendleft(reversed(list(self._alone(task.batch))))
            else:
                self._lost_once.add(task.batch.number)
                self._again.appendleft(replace(task, try_number=task.try_number + 1))
            return Settled(attempts=attempts, again=True)
        (job,) = task.batch.jobs
        if self._numbers.get((job.id, job.fingerprint), 0) + 1 < self._max_attempts:
            self._again.appendleft(replace(task, try_number=task.try_number + 1))
            return Settled(attempts=self._attempts(result, "lost"), again=True)
        return Settled(attempts=self._attempts(result, "failed"), num_failed=1)

    def _settle_failed(self, result: TaskResult) -> Settled:
        batch = result.task.batch
        attempts = self._attempts(result, "failed")
        if result.retry_alone and len(batch.jobs) > 1:
            self._again.extendleft(reversed(list(self._alone(batch))))
            return Settled(attempts=attempts, again=True)
        return Settled(attempts=attempts, num_failed=len(batch.jobs))

    def _attempts(self, result: TaskResult, state: str, *, counted: bool = True) -> tuple[Attempt, ...]:
        return tuple(
            Attempt(
                job=job,
                state=state,
                number=self._count(job) if counted else self._numbers.get((job.id, job.fingerprint), 0),
                result=None,
                reason=result.reason,
                traceback=result.traceback,
            )
            for job in result.task.batch.jobs
        )

    def _count(self, job: Job) -> int:
        number = self._numbers.get((job.id, job.fingerprint), 0) + 1
        self._numbers[job.id, job.fingerprint] = number
        return number

    def _within_cap(self, task: Task) -> Iterator[Task]:
        """The task, or its parts when memory has shown that its size is too large for its bucket."""
        batch = task.batch
        cap = self._caps.get(batch.bucket.key)
        if cap is None or batch.size <= cap:
            yield task
            return
        for start in range(0, len(batch.jobs), cap):
            part = replace(batch, jobs=batch.jobs[start : start + cap], size=cap, cap=cap)
            yield replace(self._new_task(part), texts=task.texts if start == 0 else ())

    def _alone(self, batch: Batch) -> Iterator[Task]:
        for job in batch.jobs:
            yield self._new_task(replace(batch, jobs=(job,)))

    def _new_task(self, batch: Batch) -> Task:
        number = self._next_number
        self._next_number += 1
        return Task(batch=replace(batch, number=number), try_number=1)


def largest_power_of_two_below(size: int) -> int:
    """size > 1."""
    return 1 << ((size - 1).bit_length() - 1)
