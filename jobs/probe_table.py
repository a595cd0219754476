"""What `vgbatch probe` prints: one dictionary for `--json`, the same facts as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jobs.probing import BucketProbe, Probe
from jobs.terminal import line
from jobs.views import bucket_names, bucket_settings
from manifests.wording import counted
from pipeline.config import NUMERICS


def probe_facts(probe: Probe) -> dict[str, Any]:
    """JSON-ready. clip_step_s: seconds a clip and denoising step; times_as_fast: as one clip at a time."""
    return {
        "probe_id": probe.probe_id,
        "gpu_name": probe.gpu_name,
        "numerics": NUMERICS,
        "buckets": [_bucket_facts(one) for one in probe.buckets],
        "left": probe.num_left,
        "stopped_by": probe.stopped_by,
    }


def _bucket_facts(one: BucketProbe) -> dict[str, Any]:
    alone_s = one.rows[0].clip_step_s if one.rows else None
    return {
        **bucket_settings(one.bucket),
        "cap": one.cap,
        "reason": one.reason,
        "sizes": [
            {
                "size": row.size,
                "clip_step_s": row.clip_step_s,
                "times_as_fast": alone_s / row.clip_step_s if alone_s and row.clip_step_s else None,
                "peak_memory_bytes": row.peak_memory_bytes if row.clip_step_s else None,
            }
            for row in one.rows
        ],
    }


def show_probe(facts: Mapping[str, Any], console: Console) -> None:
    """facts: of probe_facts."""
    buckets = facts["buckets"]
    if not buckets and not facts["left"]:
        line(console, "nothing to probe: every job is delivered, rejected or given up")
        return
    if any(bucket["sizes"] for bucket in buckets):
        console.print(_table(buckets))
    if num_chosen := sum(bucket["cap"] is not None for bucket in buckets):
        caps = counted(num_chosen, "cap")
        line(console, f"{caps} measured on {facts['gpu_name']}, for `run` to use")
    for bucket in buckets:
        if bucket["cap"] is None:
            line(console, f"no cap for {bucket_names(bucket)[1]}: {bucket['reason']}")
    if facts["stopped_by"]:
        left = counted(facts["left"], "bucket")
        line(console, f"stopped by {facts['stopped_by']}: {left} without a cap, the same command begins anew")


def _table(buckets: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", overflow="fold")
    table.add_column("bucket")
    for name in ("size", "s/clip/step", "times as fast", "peak GiB"):
        table.add_column(name, justify="right")
    table.add_column("")
    for bucket in buckets:
        names = [escape(name) for name in bucket_names(bucket)]
        for cells in _rows(bucket):
            table.add_row(*names, *cells)
            names = ["", ""]
    return table


def _rows(bucket: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in bucket["sizes"]:
        if row["clip_step_s"] is None:
            yield str(row["size"]), "", "", "", "out of memory"
            continue
        yield (
            str(row["size"]),
            f"{row['clip_step_s']:.4g}",
            f"{row['times_as_fast']:.2f}",
            f"{row['peak_memory_bytes'] / 2**30:.1f}",
            "cap" if row["size"] == bucket["cap"] else "",
        )
