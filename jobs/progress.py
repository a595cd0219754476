"""What a person sees while a run is at work: a bar on a terminal, one line a minute elsewhere."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jobs.messages import TaskResult
from jobs.terminal import printable
from manifests.planner import Plan
from manifests.wording import counted
from storage.rows import Outcome

LINE_EVERY_S = 60.0


class Eta:
    """Seconds left, from how long batches of each bucket took.

    earlier: median device seconds a slot of a batch by bucket key, from runs before this one. Only batches to
    be rendered count: reused jobs take no time and must not make the rest look quick.
    """

    def __init__(self, plan: Plan, *, earlier: Mapping[str, float], num_devices: int) -> None:
        self._keys = [bucket.key for bucket in plan.buckets]
        self._work = {b.key: float(b.width * b.height * b.num_frames * b.steps) for b in plan.buckets}
        self._left: dict[str, float] = defaultdict(float)
        for index, size in zip(
            plan.batches["bucket"].to_pylist(), plan.batches["size"].to_pylist(), strict=True
        ):
            self._left[self._keys[index]] += size
        self._spent_s: dict[str, float] = defaultdict(float)
        self._slots: dict[str, float] = defaultdict(float)
        self._earlier = earlier
        self._num_devices = num_devices

    def note(self, result: TaskResult) -> None:
        """Take one finished try into account."""
        batch = result.task.batch
        key = batch.bucket.key
        if result.state == "done":
            self._left[key] = max(0.0, self._left[key] - batch.size)
            self._spent_s[key] += result.device_s
            self._slots[key] += batch.size

    def seconds_left(self) -> float | None:
        """None until something is known of any bucket."""
        per_work = self._seconds_per_work()
        if per_work is None:
            return None
        total = 0.0
        for key, slots in self._left.items():
            if self._slots[key]:
                total += slots * self._spent_s[key] / self._slots[key]
            else:
                total += slots * self._earlier.get(key, self._work[key] * per_work)
        return total / self._num_devices

    def _seconds_per_work(self) -> float | None:
        work = sum(self._work[key] * slots for key, slots in self._slots.items())
        if work:
            return sum(self._spent_s.values()) / work
        known = [self._earlier[key] / self._work[key] for key in self._keys if key in self._earlier]
        return sum(known) / len(known) if known else None


class RunProgress:
    """Counts what came in and shows it. A context manager around the run's loop."""

    def __init__(self, console: Console, *, num_jobs: int, eta: Eta) -> None:
        self._console = console
        self._eta = eta
        self._num_jobs = num_jobs
        self._begin_s = time.monotonic()
        self._last_line_s = self._begin_s
        self.num_delivered = 0
        self.num_failed = 0
        self.num_frames = 0
        self._bar = self._make_bar() if console.is_terminal else None
        self._bar_task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
            self._bar_task = self._bar.add_task("render", total=self._num_jobs, detail="loading the model")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def note(self, result: TaskResult, outcome: Outcome, *, num_failed: int) -> None:
        """One result came in."""
        self._eta.note(result)
        self.num_delivered += len(outcome.clips)
        self.num_failed += num_failed
        self.num_frames += sum(clip.num_frames for clip in outcome.clips)
        self.tick()

    def say(self, text: str) -> None:
        """One line above the bar, or in the log."""
        self._console.print(escape(printable(text)), highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Bring the bar up to date, or write the line of this minute."""
        if self._bar:
            assert self._bar_task is not None
            done = self.num_delivered + self.num_failed
            self._bar.update(self._bar_task, completed=done, detail=self._detail())
        elif time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            jobs = counted(self._num_jobs, "job")
            self.say(f"{self.num_delivered + self.num_failed} of {jobs}, {self._detail()}")

    def _detail(self) -> str:
        elapsed_s = time.monotonic() - self._begin_s
        left_s = self._eta.seconds_left()
        if left_s is None:
            return "loading the model" if not self.num_failed else f"failed {self.num_failed}"
        eta = format_duration(left_s)
        return f"{self.num_frames / elapsed_s:.1f} frames/s, ETA {eta}, failed {self.num_failed}"

    def _make_bar(self) -> Progress:
        return Progress(
            TextColumn("rendering"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("jobs, {task.fields[detail]}, running"),
            TimeElapsedColumn(),
            console=self._console,
        )


def format_duration(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if 0 < seconds < 10 else f"{whole} s"
    minutes, rest_s = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s" if rest_s else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
