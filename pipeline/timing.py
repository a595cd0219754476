"""Where a batch's time and memory went."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipeline.rendering import StageTimes


class StageClock:
    """Seconds of each stage of one batch, the device's queued work included, and its peak of memory."""

    def __init__(self, device: str) -> None:
        self._on_card = device != "cpu"
        self._device = device
        self._seconds: dict[str, float] = {}
        if self._on_card:
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        if self._on_card:
            torch.cuda.synchronize(self._device)
        self._seconds[name] = time.monotonic() - started

    def times(self) -> StageTimes:
        return StageTimes(**self._seconds)

    def peak_memory_bytes(self) -> int:
        """Of torch's allocator on a card; of this whole process, since its start, on the CPU."""
        if self._on_card:
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
