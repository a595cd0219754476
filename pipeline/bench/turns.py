"""Sides that do the same work take turns on one device: heat and clocks are the same for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from pipeline.bench.clock import Call, Clock
from pipeline.bench.results import Column

# Long enough that a side runs at its own steady clock, short enough that drift meets all sides alike.
TURN_S = 2.0

C = TypeVar("C", bound=Callable[[], Any])


def take_turns(
    clock: Clock, calls: Mapping[str, Call], *, expected_ms: Mapping[str, float], seconds: float
) -> dict[str, tuple[float, ...]]:
    """Milliseconds of each side's calls. Every side gets about `seconds`, and at least one call.

    A turn is as long for each side, so that all end together. The calls must be warm. expected_ms: of one
    call of each side, to reckon turns with.
    """
    turn_ms = max(*expected_ms.values(), 1e3 * min(TURN_S, seconds))
    counts = {name: max(1, round(turn_ms / max(expected_ms[name], 1e-3))) for name in calls}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(math.ceil(1e3 * seconds / turn_ms) or 1):
        for name, call in calls.items():
            samples[name] += clock.turn(call, count=counts[name])
    return {name: tuple(taken) for name, taken in samples.items()}


@dataclass
class Lineup:
    """The sides of one stage, each built, warmed up and its memory measured before any is timed.

    shared_bytes: allocated before the first side was built, and counted to each of them.
    """

    clock: Clock
    shared_bytes: int = 0
    _sides: dict[str, _Side] = field(default_factory=dict)
    _expected: torch.Tensor | None = None

    def add(
        self,
        name: str,
        build: Callable[[], C],
        *,
        units: int = 1,
        facts: Mapping[str, Any] | None = None,
        output_of: Callable[[C], torch.Tensor] | None = None,
        shares: bool = True,
    ) -> None:
        """build: makes the side's call, and what it needs. units: made by a call; a sample is of one.

        A call's output is compared with the first side's where both are tensors. output_of: of a call that
        keeps none. shares: what was there before the first side.
        """
        others_bytes = self.clock.allocated_bytes() - (self.shared_bytes if shares else 0)
        call = build()
        call()  # what is compiled, chosen or allocated the first time
        outputs: list[Any] = []
        (expected_ms,), peak = self.clock.peak_of(
            lambda: self.clock.turn(lambda: outputs.append(call()), count=1)
        )
        output = outputs.pop()
        self._sides[name] = _Side(
            call=call,
            expected_ms=expected_ms,
            units=units,
            peak_memory_bytes=None if peak is None else peak - others_bytes,
            facts=dict(facts or {}) | self._compared(output if output_of is None else output_of(call)),
        )

    def _compared(self, output: Any) -> dict[str, float]:
        if not isinstance(output, torch.Tensor):
            return {}
        assert output.isfinite().all(), "the weights of a bench keep every number finite"
        if self._expected is None:
            self._expected = output.float()
            return {}
        error = torch.linalg.vector_norm(output.float() - self._expected)
        return {"relative_difference": float(error / torch.linalg.vector_norm(self._expected))}

    def run(
        self, *, seconds: float, beside: Mapping[str, Call] | None = None
    ) -> tuple[tuple[Column, ...], dict[str, tuple[float, ...]]]:
        """The columns, and samples of the calls `beside`, which take turns too and are no columns."""
        self._expected = None  # a whole video, perhaps
        calls = {name: side.call for name, side in self._sides.items()} | dict(beside or {})
        expected_ms = {name: side.expected_ms for name, side in self._sides.items()}
        for name, call in (beside or {}).items():
            (expected_ms[name],) = self.clock.turn(call, count=1)
        samples = take_turns(self.clock, calls, expected_ms=expected_ms, seconds=seconds)
        columns = tuple(
            Column(
                name=name,
                samples_ms=tuple(ms / side.units for ms in samples.pop(name)),
                peak_memory_bytes=side.peak_memory_bytes,
                facts=side.facts,
            )
            for name, side in self._sides.items()
        )
        return columns, samples


@dataclass(frozen=True, kw_only=True)
class _Side:
    call: Call
    expected_ms: float
    units: int
    peak_memory_bytes: int | None
    facts: Mapping[str, Any]
