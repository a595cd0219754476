"""What plan, run and status print: one dictionary for `--json`, the same facts as text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jobs.prepare import Planned
from jobs.progress import format_duration
from jobs.runner import RunSummary
from jobs.terminal import line
from manifests.job import Bucket, Weights
from manifests.packing import RULE
from manifests.presets import EXACT
from manifests.wording import counted

MAX_ROWS_SHOWN = 20
_MAX_NAME_LENGTH = 40  # of a model or LoRA in a table; `--json`, and the line of each model, have it whole


def plan_facts(planned: Planned) -> dict[str, Any]:
    """The plan as JSON-ready data: totals, buckets, rejected rows, reasons."""
    plan = planned.plan
    buckets = _bucket_facts(planned)
    return {
        "jobs": plan.jobs.num_rows + plan.reused.num_rows + plan.exhausted.num_rows,
        "to_render": plan.jobs.num_rows,
        "reused": plan.reused.num_rows,
        "exhausted": plan.exhausted.num_rows,
        "left_out": plan.left_out.num_rows,
        "rejected": plan.rejected.num_rows,
        "batches": plan.batches.num_rows,
        "buckets": buckets,
        "expected_device_s": _expected_s(buckets),
        "render_again": _reason_counts(plan.jobs),
        "warnings": _counts(plan.jobs["warning"]),
        "rejected_rows": rejected_facts(plan.rejected),
        "notes": list(plan.notes),
    }


def _bucket_facts(planned: Planned) -> list[dict[str, Any]]:
    plan = planned.plan
    grouped = plan.batches.append_column("jobs", pc.subtract(plan.batches["stop"], plan.batches["start"]))
    sums = grouped.group_by("bucket").aggregate(
        [("number", "count"), ("jobs", "sum"), ("size", "sum"), ("size", "max"), ("cap", "max")]
    )
    facts = []
    for row in sums.sort_by("bucket").to_pylist():
        bucket = plan.buckets[row["bucket"]]
        slot_s = planned.bucket_s.get(bucket.key)
        facts.append(
            {
                **bucket_settings(bucket),
                "jobs": row["jobs_sum"],
                "batches": row["number_count"],
                "batch_size": row["size_max"],
                "cap": row["cap_max"],
                "cap_source": plan.cap_sources[row["bucket"]],
                "fill_frac": row["jobs_sum"] / row["size_sum"],
                "expected_device_s": None if slot_s is None else slot_s * row["size_sum"],
            }
        )
    return facts


def bucket_settings(bucket: Bucket) -> dict[str, Any]:
    """What a bucket is, JSON-ready."""
    return {
        "bucket": bucket.key,
        "model": bucket.model,
        "lora": bucket.lora,
        "revision": bucket.revision,
        "preset": bucket.preset,
        "width": bucket.width,
        "height": bucket.height,
        "num_frames": bucket.num_frames,
        "steps": bucket.steps,
        "guidance_scale": bucket.guidance_scale,
        "guidance_scale_2": bucket.guidance_scale_2,
        "flow_shift": bucket.flow_shift,
    }


def _expected_s(buckets: Sequence[Mapping[str, Any]]) -> float | None:
    """Device seconds of the whole plan; None while a bucket of it was never rendered here."""
    times = [bucket["expected_device_s"] for bucket in buckets]
    return None if None in times else sum(times)


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    counted = pc.value_counts(column.drop_null()).to_pylist()
    return {item["values"]: item["counts"] for item in sorted(counted, key=lambda item: -item["counts"])}


def _reason_counts(jobs: pa.Table) -> dict[str, int]:
    return _counts(jobs["reason"])


def show_plan(planned: Planned, console: Console) -> None:
    """The plan for people: buckets, then what is reused, run again or rejected, and why."""
    facts = plan_facts(planned)
    if not facts["jobs"] and not facts["rejected"]:
        console.print("0 jobs")
    if facts["buckets"]:
        console.print(_bucket_table(facts["buckets"][:MAX_ROWS_SHOWN]))
    if len(facts["buckets"]) > MAX_ROWS_SHOWN:
        more = len(facts["buckets"]) - MAX_ROWS_SHOWN
        line(console, f"{counted(more, 'more bucket')}, all of them in `vgbatch plan --json`")
    line(console, _plan_line(facts))
    for reason, count in facts["render_again"].items():
        line(console, f"again: {_jobs(count)}: {reason}")
    for warning, count in list(facts["warnings"].items())[:MAX_ROWS_SHOWN]:
        line(console, f"adjusted: {_jobs(count)}: {warning}")
    show_rejected(facts["rejected_rows"], console)
    for note in facts["notes"]:
        line(console, f"note: {note}")


def _plan_line(facts: Mapping[str, Any]) -> str:
    parts = [
        f"{facts['to_render']} to render in {counted(facts['batches'], 'batch', 'batches')}",
        f"{facts['reused']} reused",
        f"{facts['rejected']} rejected",
    ]
    if facts["exhausted"]:
        parts.append(f"{facts['exhausted']} given up (`vgbatch retry` tries them again)")
    if facts["left_out"]:
        parts.append(f"{facts['left_out']} left out by --limit or --select")
    expected_s = facts["expected_device_s"]
    if facts["batches"] and expected_s is not None:
        parts.append(f"expected device time {format_duration(expected_s)}")
    return ", ".join(parts)


def bucket_names(bucket: Mapping[str, Any]) -> tuple[str, str]:
    """Of bucket_settings, for a table: its model with LoRAs, names shortened; its size, steps and preset."""
    size = f"{bucket['width']}x{bucket['height']}x{bucket['num_frames']} {counted(bucket['steps'], 'step')}"
    preset = "" if bucket["preset"] == EXACT else f" {bucket['preset']}"
    loras = bucket["lora"] and ", ".join(_ending(name.strip()) for name in bucket["lora"].split(","))
    return str(Weights(_ending(bucket["model"]), loras)), size + preset


def _ending(name: str) -> str:
    """Of a path, which is told from others by its end."""
    return name if len(name) <= _MAX_NAME_LENGTH else "..." + name[3 - _MAX_NAME_LENGTH :]


def _bucket_cells(bucket: Mapping[str, Any]) -> tuple[str, str, str]:
    """Model, size with steps, and guidance."""
    second = bucket["guidance_scale_2"]
    return (
        *bucket_names(bucket),
        f"{bucket['guidance_scale']:g}" + (f"/{second:g}" if second is not None else ""),
    )


def _bucket_table(buckets: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", overflow="fold")
    for name, justify in (
        ("bucket", "left"),
        ("guidance", "right"),
        ("jobs", "right"),
        ("batches", "right"),
        ("size/cap", "right"),
        ("fill", "right"),
        ("expected", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # rich's literal type
    alike = Counter(_bucket_cells(bucket) for bucket in buckets)
    for bucket in buckets:
        expected_s = bucket["expected_device_s"]
        model, label, guidance = _bucket_cells(bucket)
        # Said only where nothing else tells two buckets apart.
        shift = f" shift {bucket['flow_shift']:g}" if alike[model, label, guidance] > 1 else ""
        table.add_row(
            escape(model),
            label + shift,
            guidance,
            str(bucket["jobs"]),
            str(bucket["batches"]),
            f"{bucket['batch_size']}/{bucket['cap']}" + _cap_note(bucket["cap_source"]),
            f"{bucket['fill_frac']:.0%}",
            "unknown" if expected_s is None else format_duration(expected_s),
        )
    return table


def _cap_note(source: str) -> str:
    return "" if source == RULE else f" ({source})"


def rejected_facts(rejected: pa.Table) -> list[dict[str, Any]]:
    """Rejected rows as JSON-ready data; tags left out."""
    return list(rejected.drop_columns(["tags"]).to_pylist())


def show_rejected(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Rejected rows, each with what would be valid; the first ones when there are many."""
    for row in rows[:MAX_ROWS_SHOWN]:
        value = f" = {_visible(row['value'])}" if row["value"] else ""
        name = "" if row["id"] is None else f" (id {row['id']!r})"
        where = f"{row['file']} row {row['row']}{name}"
        line(console, f"rejected: {where}: {row['column']}{value}: {row['reason']}")
    more = len(rows) - MAX_ROWS_SHOWN
    if more > 0:
        line(
            console,
            f"rejected: {counted(more, 'more row')}, all of them in `vgbatch plan --json`",
        )


def _visible(value: str) -> str:
    """On one line, and in quotes where its ends would not show."""
    return repr(value) if value != value.strip() or len(value.splitlines()) > 1 else value


def run_facts(summary: RunSummary) -> dict[str, Any]:
    """The summary as JSON-ready data."""
    return {name: _plain(value) for name, value in asdict(summary).items()}


def show_run(summary: RunSummary, console: Console) -> None:
    """The summary for people."""
    parts = [f"{summary.num_delivered} delivered"]
    parts += [
        f"{count} {what}"
        for count, what in (
            (summary.num_reused, "reused"),
            (summary.num_failed, "failed"),
            (summary.num_rejected, "rejected"),
            (summary.num_exhausted, "given up"),
            (summary.num_left, "left"),
        )
        if count
    ]
    total = summary.num_planned + summary.num_reused + summary.num_rejected + summary.num_exhausted
    line(console, f"run {summary.run_id}: {_jobs(total)}: {', '.join(parts)}")
    if summary.num_delivered:
        per_video_s = summary.device_s / summary.num_delivered
        line(
            console,
            f"{counted(summary.num_frames, 'frame')}, {summary.clip_s:.1f} s of video in "
            f"{format_duration(summary.elapsed_s)}; devices held {format_duration(summary.device_s)}, "
            f"{per_video_s:.2f} s a video",
        )
    listed = f"list in {summary.out / 'clips.parquet'}, " if summary.listed else ""
    if summary.out.is_dir():
        line(console, f"clips in {summary.out}, {listed}ledger {summary.ledger}")
    else:
        line(
            console,
            f"the folder for clips is gone: {summary.out}; the same command makes it and its clips anew",
        )
    if (summary.num_failed or summary.num_exhausted) and summary.ledger.exists():
        line(console, "`vgbatch status` says why jobs failed, `vgbatch retry` tries them again")
    if summary.stopped_by:
        line(console, f"stopped by {summary.stopped_by}: the same command goes on where this run stopped")


def show_mapping(facts: Mapping[str, Any], console: Console) -> None:
    """Names and values, one a line."""
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        text = "n/a" if value is None else str(_plain(value))
        line(console, f"{name.replace('_', ' '):<{width}}  {text}")


def _plain(value: Any) -> Any:
    """JSON-ready: instants in ISO form, money and paths as text."""
    match value:
        case datetime():
            return value.isoformat(timespec="seconds")
        case Decimal() | Path():
            return str(value)
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value


def plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts ready for json.dumps."""
    return {name: _plain(value) for name, value in facts.items()}


def _jobs(count: int) -> str:
    return counted(count, "job")
