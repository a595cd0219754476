"""Where a batch's time and memory went."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from pipeline.kernels.triton_jit import Compiled, compiled
from pipeline.rendering import StageTimes


class StageClock:
    """Seconds of each stage of one batch, the device's queued work included, and its peak of memory.

    Compiling kernels is no stage's work: it counts to loading.
    """

    def __init__(self, device: str) -> None:
        self._on_card = device != "cpu"
        self._device = device
        self._seconds: dict[str, float] = {}
        self._compiled_before = compiled()
        if self._on_card:
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started, compiled_before = time.monotonic(), compiled()
        yield
        if self._on_card:
            torch.cuda.synchronize(self._device)
        elapsed_s = time.monotonic() - started
        self._seconds[name] = max(0.0, elapsed_s - (compiled() - compiled_before).seconds)

    def times(self) -> StageTimes:
        times = StageTimes(**self._seconds)
        return replace(times, load_s=times.load_s + self.compiled().seconds)

    def compiled(self) -> Compiled:
        """Since the batch began."""
        return compiled() - self._compiled_before

    def peak_memory_bytes(self) -> int:
        """Of torch's allocator on a card; of this whole process, since its start, on the CPU."""
        if self._on_card:
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
