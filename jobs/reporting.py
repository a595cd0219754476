"""`vgbatch report`: the ledger's tables through the cost room, in the form asked for."""

from __future__ import annotations

from typing import Literal

from rich.console import Console

from cost.formats import render_csv, render_json, render_table
from cost.instants import parse_instant
from cost.report import Report, build_report
from jobs.config import Settings
from storage.ledger import Ledger


def make_report(settings: Settings, *, by: str | None, since: str | None, until: str | None) -> Report:
    """Reads the ledger and adds the prices. UsageError, LedgerError."""
    bounds = {
        flag: None if text is None else parse_instant(text, flag=f"--{flag}", tz=settings.tz)
        for flag, text in (("since", since), ("until", until))
    }
    tables = Ledger(settings.ledger).tables("runs", "jobs", "batches", "attempts", "clips")
    return build_report(
        tables,
        prices=settings.prices,
        by=by,
        since=bounds["since"],
        until=bounds["until"],
        tz=settings.tz,
    )


def print_report(report: Report, *, console: Console, form: Literal["table", "json", "csv"]) -> None:
    """On stdout."""
    if form == "table":
        render_table(report, console)
    else:
        print(render_json(report) if form == "json" else render_csv(report), end="")
