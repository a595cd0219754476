"""What a bench found. No torch here: the command line prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

STAGES = ("forward", "decode", "clip", "small", "steady", "turbo", "fast")
WRITING_STAGES = ("clip", "turbo", "fast")  # those that write files
DEFAULT_STAGES = ("forward", "decode")

# The columns, in the order of printing.
DIFFUSERS, TUNED, OURS = "diffusers", "diffusers tuned", "ours"
OURS_FP8 = "ours fp8"
OURS_SPARSE = "ours sparse"  # in fp8 too, and attention between a share of all pairs of tokens
OURS_BY_FRAME = "ours by frame"  # decoding one latent frame at a time, where memory is short


@dataclass(frozen=True, kw_only=True)
class Column:
    """One side of a stage.

    samples_ms: one for each timed call, of what the stage says it times. peak_memory_bytes: of this side
    alone, its weights included; None on the CPU. facts: what else is worth knowing, as names and values.
    """

    name: str
    samples_ms: tuple[float, ...]
    peak_memory_bytes: int | None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median_ms(self) -> float:
        return median(self.samples_ms)


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """operations: of one sample, the same for every column; None where they were not counted.

    timed: what a sample is. notes: what the timer includes and leaves out. matmul_ms: of as many operations
    as `matmul_operations`, measured in turns with the columns.
    """

    stage: str
    timed: str
    notes: tuple[str, ...]
    columns: tuple[Column, ...] = ()
    operations: int | None = None
    matmul_operations: int | None = None
    matmul_samples_ms: tuple[float, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def matmul_tflops(self) -> float | None:
        if self.matmul_operations is None:
            return None
        return self.matmul_operations / median(self.matmul_samples_ms) / 1e9

    def ratio(self, column: Column) -> float | None:
        """How many times as fast as diffusers as documented; None in a stage without that column."""
        first = next((each for each in self.columns if each.name == DIFFUSERS), None)
        return None if first is None else first.median_ms / column.median_ms

    def tflops(self, column: Column) -> float | None:
        return None if self.operations is None else self.operations / column.median_ms / 1e9

    def matmul_share(self, column: Column) -> float | None:
        rate, sustained = self.tflops(column), self.matmul_tflops
        return None if rate is None or sustained is None else rate / sustained
