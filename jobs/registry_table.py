"""What `vgbatch models` prints: one dictionary for `--json`, the same facts as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jobs.aliases import SHORT_DIGITS, clashes, latest_changes
from jobs.config import Settings
from jobs.registry import Change
from jobs.terminal import line
from jobs.verification.verify import Verification
from storage.ledger import Ledger
from storage.rows import AliasRow

_WORDS = {"add": "added", "promote": "promoted", "rollback": "rolled back"}


def list_facts(settings: Settings) -> dict[str, Any]:
    """Every alias of the ledger and of the configuration file, and what is wrong with them.

    verified: whether the revision passed when it was last compared with another; null where it never was.
    """
    ledger = Ledger(settings.ledger)
    latest = latest_changes(ledger)
    verdicts = ledger.verdicts() if latest else {}
    registered = [
        {**_row_facts(row), "verified": verdicts.get(row.revision), "origin": str(settings.ledger)}
        for row in latest.values()
    ]
    unknown = dict.fromkeys(("revision", "action", "forced", "since", "verified"))
    configured = [
        {"alias": alias, "target": target, **unknown, "origin": str(settings.config_file)}
        for alias, target in sorted(settings.aliases.items())
    ]
    return {
        "aliases": registered + configured,
        "clashes": list(clashes(latest, settings=settings)),
    }


def show_list(facts: Mapping[str, Any], console: Console) -> None:
    """facts: of list_facts."""
    if not facts["aliases"]:
        line(console, "no alias yet: `vgbatch models add ALIAS MODEL` registers one")
        return
    table = _table("alias", "target", "revision", "since", "by", "verified")
    for alias in facts["aliases"]:
        table.add_row(
            escape(alias["alias"]),
            escape(alias["target"]),
            (alias["revision"] or "")[:SHORT_DIGITS],
            alias["since"] or "",
            escape(alias["origin"]) if alias["action"] is None else _how(alias),
            "" if alias["action"] is None else {True: "yes", False: "failed", None: "no"}[alias["verified"]],
        )
    console.print(table)
    for clash in facts["clashes"]:
        line(console, f"refused in every run: {clash}")


def history_facts(changes: Sequence[AliasRow]) -> dict[str, Any]:
    """Every change of one alias, oldest first."""
    return {"alias": changes[0].alias, "changes": [_row_facts(row) for row in changes]}


def show_history(facts: Mapping[str, Any], console: Console) -> None:
    """facts: of history_facts."""
    table = _table("since", "how", "revision", "target")
    for change in facts["changes"]:
        cells = (change["since"], _how(change), change["revision"][:SHORT_DIGITS], escape(change["target"]))
        table.add_row(*cells)
    console.print(table)


def change_facts(change: Change) -> dict[str, Any]:
    """changed: whether the alias moved. verification: of `verify`, null where nothing was compared."""
    return {
        **_row_facts(change.row),
        "changed": change.made,
        "verification": None if change.verification is None else change.verification.facts,
        "before": None if change.before is None else _row_facts(change.before),
    }


def show_change(change: Change, console: Console) -> None:
    """One line: what the alias points at, and why."""
    row, before = change.row, change.before
    now = f"{row.alias} points at {_place(row)}"
    if not change.made and change.verification is not None:
        why, hint = _refusal(change.verification)
        line(console, f"not promoted, {why}: {now}{hint}")
    elif not change.made:
        line(console, f"nothing to do: {now} already")
    else:
        line(console, f"{now}: {_how(_row_facts(row))}" + (f", before {_place(before)}" if before else ""))


def _refusal(verification: Verification) -> tuple[str, str]:
    """Why nothing was promoted, and what can be done about it."""
    if verification.kept:
        return "the candidate is worse", "; `--force` promotes it all the same"
    if verification.facts.get("stopped_by"):
        return "stopped before the end", ""
    return "the verdict could not be kept", ""


def _row_facts(row: AliasRow) -> dict[str, Any]:
    return {
        "alias": row.alias,
        "target": row.target,
        "revision": row.revision,
        "action": row.action,
        "forced": row.forced,
        "since": row.recorded_at.isoformat(timespec="seconds"),
    }


def _how(facts: Mapping[str, Any]) -> str:
    return _WORDS[facts["action"]] + (", forced" if facts["forced"] else "")


def _place(row: AliasRow) -> str:
    return f"{row.target} (revision {row.revision[:SHORT_DIGITS]})"


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold" if name == "target" else "ellipsis", no_wrap=name != "target")
    return table
