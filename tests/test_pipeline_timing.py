"""Compiling kernels is loading, not work."""

from __future__ import annotations

import time

import pytest

from pipeline.kernels import triton_jit
from pipeline.kernels.triton_jit import Compiled, compiled
from pipeline.timing import StageClock

knobs = pytest.importorskip("triton").knobs


def compile_for(seconds: float) -> None:
    """As Triton tells its listener."""
    times = knobs.CompileTimes(
        ir_initialization=0, lowering_stages=[("ptx", round(seconds * 1e6))], store_results=0
    )
    knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=False)


def test_what_triton_compiles_is_counted() -> None:
    before = compiled()
    compile_for(1.5)
    compile_for(0.25)
    assert compiled() - before == Compiled(2, 1.75)


def test_compiling_during_a_stage_counts_to_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(triton_jit, "_compiled", Compiled())
    clock = StageClock("cpu")
    for stage, seconds, compiling_s in (
        ("load_s", 4.0, 0.0),
        ("denoise_s", 10.0, 7.0),
        ("decode_s", 3.0, 1.0),
    ):
        with clock.stage(stage):
            now_s += seconds
            compile_for(compiling_s)
    times = clock.times()
    assert (times.load_s, times.denoise_s, times.decode_s) == (12.0, 3.0, 2.0)
    assert clock.compiled().num_kernels == 3
