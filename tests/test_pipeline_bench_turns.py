"""How sides take turns, and whose memory is whose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pipeline.bench.clock import Clock
from pipeline.bench.results import DIFFUSERS, OURS, Column, StageResult
from pipeline.bench.turns import TURN_S, Lineup, take_turns


@dataclass
class FakeClock:
    """Only a call that `takes` made takes time; `held` is what is allocated."""

    held: int = 0
    now_ms: float = 0.0
    turns: list[tuple[float, int]] = field(default_factory=list)

    def takes(self, ms: float) -> Callable[[], float]:
        def call() -> float:
            self.now_ms += ms
            return ms

        return call

    def turn(self, call: Callable[[], Any], *, count: int) -> list[float]:
        samples = []
        for _ in range(count):
            started_ms = self.now_ms
            call()
            samples.append(self.now_ms - started_ms)
        self.turns.append((samples[0], count))
        return samples

    def allocated_bytes(self) -> int:
        return self.held

    def peak_of(self, call: Callable[[], Any]) -> tuple[Any, int]:
        before = self.held
        return call(), before + 1000


def test_every_side_gets_its_seconds_in_turns_of_one_length() -> None:
    clock = FakeClock()
    calls = {"slow": clock.takes(500.0), "quick": clock.takes(100.0)}
    samples = take_turns(clock, calls, expected_ms={"slow": 500.0, "quick": 100.0}, seconds=9)
    assert sum(samples["slow"]) >= 9000
    assert sum(samples["quick"]) >= 9000
    assert clock.turns == [(500.0, 4), (100.0, 20)] * 5
    assert {ms * count for ms, count in clock.turns} == {1e3 * TURN_S}


def test_a_call_longer_than_its_seconds_is_timed_once() -> None:
    clock = FakeClock()
    calls = {"slow": clock.takes(30_000.0), "quick": clock.takes(10_000.0)}
    samples = take_turns(clock, calls, expected_ms={"slow": 30_000.0, "quick": 10_000.0}, seconds=1)
    assert {name: len(taken) for name, taken in samples.items()} == {"slow": 1, "quick": 3}


def test_no_seconds_still_time_every_side() -> None:
    clock = FakeClock()
    assert take_turns(clock, {"a": clock.takes(1.0)}, expected_ms={"a": 1.0}, seconds=0) == {"a": (1.0,)}


def test_turns_are_reckoned_with_the_call_that_memory_was_measured_with() -> None:
    clock = FakeClock()
    lineup = Lineup(clock)
    lineup.add("slow", lambda: clock.takes(500.0))
    lineup.add("quick", lambda: clock.takes(100.0))
    columns, _ = lineup.run(seconds=2)
    assert clock.turns == [(500.0, 1), (100.0, 1), (500.0, 4), (100.0, 20)]
    assert [len(column.samples_ms) for column in columns] == [4, 20]


def test_a_side_counts_what_it_shares_and_what_it_built_but_not_its_neighbours() -> None:
    clock = FakeClock(held=100)
    lineup = Lineup(clock, shared_bytes=60)

    def build(own_bytes: int) -> Callable[[], float]:
        clock.held += own_bytes
        return clock.takes(1.0)

    lineup.add("first", lambda: build(5))
    lineup.add("second", lambda: build(7))
    lineup.add("third", lambda: build(20), shares=False)
    columns, beside = lineup.run(seconds=0, beside={"matmul": clock.takes(2.0)})
    assert [column.peak_memory_bytes for column in columns] == [60 + 5 + 1000, 60 + 7 + 1000, 20 + 1000]
    assert beside == {"matmul": (2.0,)}


def test_samples_are_of_one_unit_and_outputs_are_compared_with_the_first_side() -> None:
    lineup = Lineup(Clock("cpu"))
    lineup.add(DIFFUSERS, lambda: lambda: torch.tensor([3.0, 4.0]))
    lineup.add(OURS, lambda: lambda: torch.tensor([3.0, 4.5]), units=8, facts={"attention": "torch"})
    (reference, own), _ = lineup.run(seconds=0)
    assert reference.facts == {}
    assert own.facts == {"attention": "torch", "relative_difference": pytest.approx(0.1)}
    assert reference.peak_memory_bytes is None


def test_a_call_that_keeps_no_output_is_compared_by_what_it_would_give() -> None:
    lineup = Lineup(Clock("cpu"))
    lineup.add(DIFFUSERS, lambda: lambda: torch.tensor([3.0, 4.0]))
    lineup.add(OURS, lambda: lambda: None, output_of=lambda call: torch.tensor([3.0, 3.5]))
    (_, own), _ = lineup.run(seconds=0)
    assert own.facts == {"relative_difference": pytest.approx(0.1)}


def test_a_unit_takes_its_share_of_a_call() -> None:
    clock = FakeClock()
    lineup = Lineup(clock)
    lineup.add(OURS, lambda: clock.takes(80.0), units=8)
    (column,), _ = lineup.run(seconds=0)
    assert column.samples_ms == (10.0,)


def test_weights_that_give_no_numbers_end_the_bench() -> None:
    with pytest.raises(AssertionError):
        Lineup(Clock("cpu")).add(DIFFUSERS, lambda: lambda: torch.tensor([float("nan")]))


def test_the_processor_clock_gives_a_time_for_each_call() -> None:
    calls: list[int] = []
    samples = Clock("cpu").turn(lambda: calls.append(sum(range(10_000))), count=3)
    assert len(samples) == len(calls) == 3
    assert all(ms > 0 for ms in samples)


def test_rates_and_ratios_come_from_medians() -> None:
    columns = [
        Column(name=name, samples_ms=samples, peak_memory_bytes=None)
        for name, samples in ((DIFFUSERS, (40.0, 20.0, 30.0)), (OURS, (10.0, 50.0, 10.0)))
    ]
    result = StageResult(
        stage="forward",
        timed="",
        notes=(),
        columns=tuple(columns),
        operations=6 * 10**12,
        matmul_operations=8 * 10**12,
        matmul_samples_ms=(9.0, 10.0, 11.0),
    )
    assert [result.ratio(column) for column in columns] == [1.0, 3.0]
    assert [result.tflops(column) for column in columns] == [pytest.approx(200.0), pytest.approx(600.0)]
    assert result.matmul_tflops == pytest.approx(800.0)
    assert result.matmul_share(columns[1]) == pytest.approx(0.75)


def test_a_stage_of_one_side_has_no_ratio_and_no_rate() -> None:
    column = Column(name=OURS, samples_ms=(1.0,), peak_memory_bytes=None)
    result = StageResult(stage="steady", timed="", notes=(), columns=(column,))
    assert (result.ratio(column), result.tflops(column), result.matmul_share(column)) == (None, None, None)
