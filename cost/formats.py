"""A report as a table for people, as JSON and as CSV for programs.

Money has as many digits as it needs: cents from one dollar up, three significant digits below.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from decimal import Decimal
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cost.margin import NS_PER_HOUR, NS_PER_S, Economics
from cost.prices import Prices
from cost.report import Line, Report
from cost.tally import Durations

NA = "n/a"
SCHEMA = {
    "version": 1,
    "money": "USD as decimal text",
    "gpu_s": "device-seconds, all devices together",
    "frac": "a fraction of 1",
    "null": NA,
    "percentiles": "nearest rank",
}
_SIGNIFICANT_DIGITS = 3
_MAX_NAME_LENGTH = 60  # of a group in the table for people; JSON and CSV have the whole name


def render_table(report: Report, console: Console) -> None:
    """Prints the report for people; no row is cut, whatever the console's width."""
    _print_text(console, _heading(report))
    _print_table(console, _time_table(report.total))
    _print_text(console, _counts(report.total))
    _print_table(console, _economics_table(report))
    if report.groups:
        _print_table(console, _group_table(report))
    if report.durations:
        _print_table(console, _durations_table(report.durations))
    for note in report.notes:
        _print_text(console, f"note: {note}")


def render_json(report: Report) -> str:
    """One JSON object and a newline; SCHEMA, under the key `schema`, says how to read it. Never NaN."""
    text = json.dumps(
        {
            "schema": SCHEMA,
            "by": report.by,
            "since": report.since.isoformat() if report.since else None,
            "until": report.until.isoformat() if report.until else None,
            "tz": str(report.tz),
            "prices": _price_facts(report.prices),
            "total": _line_facts(report.total),
            "groups": [_line_facts(line) for line in report.groups],
            "durations": [asdict(durations) for durations in report.durations],
            "notes": report.notes,
        },
        indent=2,
        ensure_ascii=False,
        allow_nan=False,
    )
    return text + "\n"


def render_csv(report: Report) -> str:
    """A header, then one row for each group (without groups, one for the total); n/a is an empty cell.
    The columns are the JSON's keys, joined by underscores."""
    rows = [dict(_flat(_line_facts(line))) for line in report.groups or [report.total]]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def format_usd(amount: Decimal | None) -> str:
    """`$1,234.50`, `$0.04`, `$0.0000231`, `-$1.20`, `n/a`."""
    if amount is None:
        return NA
    sign = "-" if amount < 0 else ""
    return f"{sign}${_digits(abs(amount))}"


def format_hours(ns: int) -> str:
    """`12.50`, `0.0111`."""
    return _digits(Decimal(ns) / NS_PER_HOUR)


def format_percent(frac: Decimal | float | None) -> str:
    """`12.3 %`, `n/a`."""
    # Rounded first: -0.00001 must not become "-0.0".
    return NA if frac is None else f"{round(float(frac) * 100, 1) + 0.0:,.1f} %"


def _amount(number: Decimal | None) -> str:
    return NA if number is None else _digits(number)


def _digits(number: Decimal) -> str:
    """A number >= 0: two decimals, or as many as three significant digits need if it is below 1."""
    if not 0 < number < 1:
        return f"{number:,.2f}"
    text = f"{number:.{_SIGNIFICANT_DIGITS - 1 - number.adjusted()}f}".rstrip("0")
    return text + "0" * (2 - len(text.partition(".")[2]))


def _heading(report: Report) -> str:
    ends = {"from": report.since, "until": report.until}
    window = [
        f"{word} {instant.astimezone(report.tz).isoformat(timespec='minutes')}"
        for word, instant in ends.items()
        if instant is not None
    ]
    price = report.prices.gpu_per_hour
    prices = [] if price is None else [f"{format_usd(price)} per GPU-hour"]
    return ", ".join([" ".join(["report", *window]), f"time zone {report.tz}", *prices])


_PARTS = {
    "useful": "useful",
    "wasted": "failed and retried",
    "load": "loading and preparing",
    "padding": "padding",
    "idle": "idle",
    "total": "total",
}


def _time_table(total: Line) -> Table:
    time, cost = total.tally.time, total.cost
    table = _table("GPU time", "hours", "share", "cost")
    for part, title in _PARTS.items():
        part_ns = getattr(time, f"{part}_ns")
        part_usd = None if cost is None else getattr(cost, f"{part}_usd")
        share = format_percent(part_ns / time.total_ns) if time.total_ns else NA
        table.add_row(title, format_hours(part_ns), share, format_usd(part_usd))
    return table


def _counts(total: Line) -> str:
    tally = total.tally
    return (
        f"videos: {tally.num_videos} of {tally.clip_ns / NS_PER_S:,.1f} s, "
        f"value {format_usd(total.value_usd)}, rendered again {tally.num_rendered_again}, "
        f"never delivered {tally.num_undelivered}\n"
        f"attempts: {tally.num_attempts}, delivered {tally.num_delivered}, failed {tally.num_failed}, "
        f"lost {tally.num_lost}"
    )


def _economics_table(report: Report) -> Table:
    bases = {"as paid": report.total.as_paid, "full load": report.total.full_load}
    if report.total.at_utilization is not None:
        bases[f"at {format_percent(report.prices.utilization)} utilization"] = report.total.at_utilization
    table = _table("per video", *bases)
    columns = [_economics_cells(basis) for basis in bases.values()]
    for title in columns[0]:
        table.add_row(title, *(column[title] for column in columns))
    return table


def _economics_cells(basis: Economics) -> dict[str, str]:
    return {
        "GPU seconds per video": _amount(basis.gpu_s_per_video),
        "videos per GPU-hour": _amount(basis.videos_per_gpu_hour),
        "cost per video": format_usd(basis.cost_per_video_usd),
        "cost per finished second": format_usd(basis.cost_per_second_usd),
        "value per GPU-hour": format_usd(basis.value_per_gpu_hour_usd),
        "gross margin": format_percent(basis.margin_frac),
    }


def _group_table(report: Report) -> Table:
    table = _table(
        f"by {report.by}",
        "videos",
        "failed",
        "GPU hours",
        "useful",
        "cost",
        "cost per video",
        "value",
        "margin",
    )
    for line in [*report.groups, report.total]:
        tally = line.tally
        total_ns = tally.time.total_ns
        table.add_row(
            "total" if line is report.total else _printable(tally.name),
            f"{tally.num_videos:,}",
            f"{tally.num_failed:,}",
            format_hours(total_ns),
            format_percent(tally.time.useful_ns / total_ns) if total_ns else NA,
            format_usd(line.cost.total_usd if line.cost else None),
            format_usd(line.as_paid.cost_per_video_usd),
            format_usd(line.value_usd),
            format_percent(line.as_paid.margin_frac),
        )
    return table


def _durations_table(durations: tuple[Durations, ...]) -> Table:
    table = _table("GPU seconds per clip", "clips", "P50", "P95", "P99")
    for bucket in durations:
        seconds = (bucket.p50_s, bucket.p95_s, bucket.p99_s)
        cells = (_digits(Decimal(str(second))) for second in seconds)
        table.add_row(_printable(bucket.bucket), f"{bucket.num_clips:,}", *cells)
    return table


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(_printable(first), no_wrap=True)
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _printable(text: str) -> Text:
    """Tags come from manifests: no markup, no control characters, no end to their length."""
    shown = text if len(text) <= _MAX_NAME_LENGTH else text[: _MAX_NAME_LENGTH - 3] + "..."
    return Text("".join(character if character.isprintable() else "?" for character in shown))


def _print_table(console: Console, table: Table) -> None:
    table.width = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    console.print(table, crop=False)
    console.print()


def _print_text(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _price_facts(prices: Prices) -> dict[str, Any]:
    return {
        "gpu_per_hour_usd": _money(prices.gpu_per_hour),
        "per_video_usd": _money(prices.per_video),
        "per_second_usd": _money(prices.per_second),
        "utilization_frac": _number(prices.utilization),
    }


def _line_facts(line: Line) -> dict[str, Any]:
    tally, time, cost = line.tally, line.tally.time, line.cost
    return {
        "name": tally.name or "total",
        "videos": tally.num_videos,
        "videos_s": tally.clip_ns / NS_PER_S,
        "rendered_again": tally.num_rendered_again,
        "never_delivered": tally.num_undelivered,
        "attempts": tally.num_attempts,
        "delivered": tally.num_delivered,
        "failed": tally.num_failed,
        "lost": tally.num_lost,
        "gpu_s": {part: getattr(time, f"{part}_ns") / NS_PER_S for part in _PARTS},
        "cost_usd": {part: None if cost is None else _money(getattr(cost, f"{part}_usd")) for part in _PARTS},
        "value_usd": _money(line.value_usd),
        "as_paid": _economics_facts(line.as_paid),
        "full_load": _economics_facts(line.full_load),
        "at_utilization": _economics_facts(line.at_utilization),
    }


def _economics_facts(basis: Economics | None) -> dict[str, Any]:
    """Money as text, other numbers as numbers; all null without a basis."""
    names = [field.name for field in fields(Economics)]
    values = {name: None if basis is None else getattr(basis, name) for name in names}
    return {name: (_money if name.endswith("_usd") else _number)(value) for name, value in values.items()}


def _money(amount: Decimal | None) -> str | None:
    return None if amount is None else f"{amount.normalize():f}"


def _number(amount: Decimal | None) -> float | None:
    return None if amount is None else float(amount)


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}_")
        else:
            yield f"{prefix}{name}", value
