"""A bench's findings for people: one table for each stage, within 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.terminal import line

_Column = Mapping[str, Any]


def show_bench(facts: Mapping[str, Any], console: Console) -> None:
    """facts: of `run_bench`."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    weights = "random weights" if facts["weights"] == "random" else f"revision {facts['weights'][:12]}"
    line(console, f"{facts['shape']}, {weights}, {facts['dtype']}, on {facts['card']}")
    line(console, f"{versions}; {facts['started_at']}")
    for stage in facts["stages"]:
        line(console, "")
        _show_stage(stage, console)


def _show_stage(stage: Mapping[str, Any], console: Console) -> None:
    line(console, f"{stage['stage']}: {stage['timed']}")
    console.print(_table(stage))
    busy_frac = stage["facts"].get("gpu_busy_frac")
    if "gpu_busy_frac" in stage["facts"]:
        line(console, f"GPU busy  {'n/a' if busy_frac is None else f'{busy_frac:.1%}'}")
    for note in stage["notes"]:
        line(console, f"  {note}")


def _table(stage: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in stage["columns"]:
        table.add_column(column["name"], justify="right")
    for label, cell in _rows(stage):
        cells = [cell(column) for column in stage["columns"]]
        if any(cells):
            table.add_row(label, *(text or "n/a" for text in cells))
    return table


def _rows(stage: Mapping[str, Any]) -> list[tuple[str, Callable[[_Column], str | None]]]:
    """Label, and the text of a column's cell; a row without any is left out."""
    matmul_tflops, is_small = stage["matmul_tflops"] or 0.0, stage["stage"] == "small"
    return [
        ("median, ms", lambda column: f"{column['median_ms']:,.1f}"),
        ("clips a second", lambda column: f"{1e3 / column['median_ms']:.3g}" if is_small else None),
        ("times as fast", lambda column: _formatted(column["ratio"], "{:.2f}x")),
        ("TFLOP/s", lambda column: _formatted(column["tflops"], "{:,.3g}")),
        (f"of matmul's {matmul_tflops:,.3g}", lambda column: _formatted(column["matmul_frac"], "{:.1%}")),
        ("peak memory", lambda column: _gibibytes(column["peak_memory_bytes"])),
        ("of it rendering, ms", lambda column: _fact(column, "render_ms", "{:,.1f}")),
        ("of it MP4, ms", lambda column: _fact(column, "mp4_ms", "{:,.1f}")),
        ("forwards computed", lambda column: _fact(column, "steps_computed", "{}")),
        ("forwards left out", lambda column: _fact(column, "steps_skipped", "{}")),
        ("attention", lambda column: _fact(column, "attention", "{}")),
        ("relative difference", lambda column: _fact(column, "relative_difference", "{:.1e}")),
        ("samples", lambda column: str(len(column["samples_ms"]))),
    ]


def _fact(column: _Column, name: str, form: str) -> str | None:
    return _formatted(column["facts"].get(name), form)


def _formatted(value: Any, form: str) -> str | None:
    return None if value is None else form.format(value)


def _gibibytes(num_bytes: int | None) -> str | None:
    return None if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"
