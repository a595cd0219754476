"""The share of the time in which at least one kernel runs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from pipeline.bench.busy import _is_kernel, busy_frac, kernel_intervals, union_length


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(2, 5)], 3),
        ([(0, 1), (1, 2)], 2),
        ([(0, 4), (3, 6)], 6),
        ([(0, 10), (2, 3)], 10),
        ([(2, 3), (0, 10), (9, 12)], 12),
        ([(0, 1), (5, 6), (5, 6)], 2),
        ([(3, 3)], 0),
    ],
)
def test_what_overlaps_is_counted_once(intervals: list[tuple[float, float]], length: float) -> None:
    assert union_length(intervals) == length


def test_a_union_holds_each_moment_that_some_interval_holds() -> None:
    chance = random.Random(5)
    for _ in range(200):
        starts = [chance.randrange(60) for _ in range(chance.randrange(12))]
        intervals = [(start, start + chance.randrange(9)) for start in starts]
        moments = {moment for start, end in intervals for moment in range(start, end)}
        assert union_length(intervals) == len(moments)


def test_busy_is_the_share_from_the_first_start_to_the_last_end() -> None:
    assert busy_frac([(100, 110), (105, 115), (119, 120)]) == pytest.approx(16 / 20)
    assert busy_frac([]) is None


def test_kernels_are_neither_copies_nor_annotations_nor_work_of_the_cpu() -> None:
    def event(name: str, device: str = "CUDA", is_user_annotation: bool = False) -> SimpleNamespace:
        device_type = SimpleNamespace(name=device)
        return SimpleNamespace(name=name, device_type=device_type, is_user_annotation=is_user_annotation)

    events = [
        event("nvjet_tst_192x192"),
        event("Memcpy DtoH (Device -> Pinned)"),
        event("Memset (Device)"),
        event("ProfilerStep#1", is_user_annotation=True),
        event("cudaLaunchKernel", device="CPU"),
    ]
    assert [_is_kernel(each) for each in events] == [True, False, False, False, False]


def test_the_cpu_has_no_kernels_but_the_call_is_made() -> None:
    calls: list[None] = []
    assert kernel_intervals(lambda: calls.append(None), device="cpu") == []
    assert len(calls) == 1
