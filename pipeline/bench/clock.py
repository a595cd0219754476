"""Time and memory of calls on one device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch

Call = Callable[[], object]
T = TypeVar("T")


def free_memory(device: str) -> None:
    """Of what nothing refers to any more, modules that refer to themselves included."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


class Clock:
    """device: "cpu" or "cuda:0"."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._on_card = device != "cpu"

    def turn(self, call: Call, *, count: int) -> list[float]:
        """Milliseconds of each of `count` calls in a row.

        On a card from event to event, and nothing waits in between: the device never runs dry because of
        the measurement.
        """
        return self._card_turn(call, count) if self._on_card else self._processor_turn(call, count)

    def wall_ms(self, call: Call) -> float:
        """Milliseconds of one call until the device has nothing left to do."""
        self.synchronize()
        started = time.perf_counter()
        call()
        self.synchronize()
        return 1e3 * (time.perf_counter() - started)

    def synchronize(self) -> None:
        if self._on_card:
            torch.cuda.synchronize(self._device)

    def allocated_bytes(self) -> int:
        """Of torch's allocator, now; 0 on the CPU, where it does not count."""
        return torch.cuda.memory_allocated(self._device) if self._on_card else 0

    def peak_of(self, call: Callable[[], T]) -> tuple[T, int | None]:
        """What `call` returned, and the most bytes allocated meanwhile, with those that were before."""
        if not self._on_card:
            return call(), None
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        result = call()
        torch.cuda.synchronize(self._device)
        return result, torch.cuda.max_memory_allocated(self._device)

    def _card_turn(self, call: Call, count: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize(self._device)
        return [before.elapsed_time(after) for before, after in pairwise(marks)]

    def _processor_turn(self, call: Call, count: int) -> list[float]:
        marks = [time.perf_counter()]
        for _ in range(count):
            call()
            marks.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in pairwise(marks)]
