"""How much of the time a card was at work: the union of its kernels' intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.bench.clock import Call

Interval = tuple[float, float]  # start and end


def union_length(intervals: Iterable[Interval]) -> float:
    """What the intervals cover, counted once where they overlap."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def busy_frac(intervals: Sequence[Interval]) -> float | None:
    """The covered share of the time from the first start to the last end; None without intervals."""
    if not intervals:
        return None
    span = max(end for _, end in intervals) - min(start for start, _ in intervals)
    return union_length(intervals) / span if span else 1.0


def kernel_intervals(call: Call, *, device: str) -> list[Interval]:
    """Microseconds of every kernel that `call` ran on the card; copies are none. Empty on the CPU."""
    if device == "cpu":
        call()
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize(device)
    return [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if _is_kernel(event)
    ]


def _is_kernel(event: Any) -> bool:
    copies = event.name.startswith(("Memcpy", "Memset"))
    return event.device_type.name == "CUDA" and not event.is_user_annotation and not copies
