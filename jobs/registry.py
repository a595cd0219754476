"""`vgbatch models`: aliases of pinned revisions, and how they move from one revision to another.

An alias is what its latest row in the ledger says. Going back is a row of its own: nothing is ever removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jobs.aliases import Aliases, find_model, latest_changes, read_aliases, same_name
from jobs.config import Settings
from jobs.kinds import VALID_ALIAS, is_alias, shown
from jobs.lock import run_lock
from jobs.runner import new_run_id
from jobs.terminal import line
from manifests.errors import Busy, ModelError, UsageError, VgbatchError
from pipeline.models.resolve import BUILTIN
from storage.filesystem import require_writable
from storage.ledger import Ledger
from storage.rows import AliasRow

if TYPE_CHECKING:
    from rich.console import Console

    from jobs.verification.verify import Verification

ADD, PROMOTE, ROLLBACK = "add", "promote", "rollback"


class Verifier(Protocol):
    """`jobs.verification.verify.verify`, as far as it is used here."""

    def __call__(
        self,
        settings: Settings,
        *,
        against: str,
        against_model: str,
        num_clips: int | None,
        console: Console,
    ) -> Verification: ...


@dataclass(frozen=True, kw_only=True)
class Change:
    """What came of a command. row: the alias's latest. before: the one that was its latest. made: whether
    anything changed. verification: of the candidate against `before`, None where they were not compared."""

    row: AliasRow
    before: AliasRow | None
    made: bool
    verification: Verification | None = None

    @property
    def exit_code(self) -> int:
        return 0 if self.made or self.verification is None else self.verification.exit_code


def add(alias: str, model: str, *, settings: Settings) -> Change:
    """A new alias of what `model` is now. Raises UsageError, ModelError, LedgerError, Busy."""
    if not is_alias(alias):
        raise UsageError(f"not a name for an alias: {shown(alias)}", hint=f"valid: {VALID_ALIAS}")
    if Path(alias).is_dir():
        raise UsageError(
            f"a folder of that name is here, which the alias would hide: {alias}",
            hint="choose another name, or rename the folder: an alias goes before a folder of its name",
        )
    aliases = read_aliases(settings)
    twin = same_name(alias, aliases.targets)
    if twin is not None:
        raise _taken(alias, twin, aliases, settings=settings)
    row = _pinned(alias, model, aliases=aliases, action=ADD)
    return Change(row=_record(row, before=None, settings=settings), before=None, made=True)


def promote(
    alias: str,
    model: str,
    *,
    settings: Settings,
    verify: Verifier,
    console: Console,
    force: bool = False,
    num_clips: int | None = None,
) -> Change:
    """Point an alias at what `model` is now, if that is no worse than what it points at, in settings.preset.

    force: also if it is worse, or cannot be compared. num_clips: to compare, `verify`'s own choice unless
    given. console: for messages.
    Raises UsageError, ModelError, LedgerError, Busy, and what verify raises.
    """
    aliases = read_aliases(settings)
    before = history(alias, settings=settings)[-1]
    row = _pinned(alias, model, aliases=aliases, action=PROMOTE)
    if row.revision == before.revision:
        # The same weights; where they lie may have changed.
        if row.target == before.target:
            return Change(row=before, before=before, made=False)
        return Change(row=_record(row, before=before, settings=settings), before=before, made=True)
    verification = _compare(
        row, before, settings=settings, verify=verify, num_clips=num_clips, console=console, force=force
    )
    passed = verification is not None and verification.passed
    # Who stops a comparison, or has no room for its verdict, wants no promotion by it, forced or not.
    if (not passed and not force) or (verification is not None and not verification.kept):
        return Change(row=before, before=before, made=False, verification=verification)
    row = _record(replace(row, forced=not passed), before=before, settings=settings)
    return Change(row=row, before=before, made=True, verification=verification)


def rollback(alias: str, *, settings: Settings) -> Change:
    """Point an alias at what it pointed at before its last promotion that was not taken back."""
    changes = history(alias, settings=settings)
    past = _taken_in_turn(changes)
    if len(past) < 2:
        raise UsageError(
            f"nothing to go back to: {alias} points at the first revision it was given",
            hint=f"`vgbatch models promote {alias} MODEL` points it at another one",
        )
    goal = past[-2]
    try:
        _require_as_it_was(goal)
    except ModelError as error:
        raise ModelError(
            f"cannot go back, {error.message}",
            hint=f"put it back, or `vgbatch models promote {alias} MODEL` with what is to be used instead",
        ) from error
    row = replace(goal, action=ROLLBACK, forced=False, recorded_at=datetime.now(UTC))
    row = _record(row, before=changes[-1], settings=settings)
    return Change(row=row, before=changes[-1], made=True)


def history(alias: str, *, settings: Settings) -> list[AliasRow]:
    """Every change of an alias, oldest first. UsageError where there is none."""
    ledger = Ledger(settings.ledger)
    changes = ledger.alias_changes() if ledger.exists() else []
    if found := [row for row in changes if row.alias == alias]:
        return found
    if alias in settings.aliases:
        raise UsageError(
            f"an alias of the configuration file, not of the ledger: {alias}",
            hint=f"change [models] in {settings.config_file}, or remove it there and `vgbatch models add` it",
        )
    names = ", ".join(sorted({row.alias for row in changes}))
    raise UsageError(
        f"no such alias in {settings.ledger}: {alias}",
        hint=f"registered: {names}" if names else "`vgbatch models add ALIAS MODEL` registers one",
    )


def _taken_in_turn(changes: Iterable[AliasRow]) -> list[AliasRow]:
    """What an alias points at, and before it what each rollback in turn would go back to."""
    stack: list[AliasRow] = []
    for row in changes:
        if row.action == ROLLBACK:
            stack.pop()
        elif stack and stack[-1].revision == row.revision:
            stack[-1] = row  # the same weights at another place
        else:
            stack.append(row)
    return stack


def _taken(alias: str, twin: str, aliases: Aliases, *, settings: Settings) -> UsageError:
    place = settings.ledger if twin in aliases.revisions else settings.config_file
    spelled = "" if alias == twin else f" as {twin}"
    return UsageError(
        f"the alias {alias} is there already{spelled}, in {place}: {aliases.targets[twin]}",
        hint=f"`vgbatch models promote {twin} MODEL` points it at another revision"
        if twin in aliases.revisions
        else "choose another name, or remove it there",
    )


def _pinned(alias: str, model: str, *, aliases: Aliases, action: str) -> AliasRow:
    """The row that points `alias` at what `model` is at this moment, whatever its name stands for later."""
    source = find_model(model, aliases=aliases).source
    if aliases.targets.get(model, model) == BUILTIN:
        target = BUILTIN
    elif source.hub_id is not None:
        target = f"{source.hub_id}@{source.base_revision}"
    else:
        target = str(source.folder)
    return AliasRow(
        alias=alias,
        target=target,
        revision=source.base_revision,
        action=action,
        forced=False,
        recorded_at=datetime.now(UTC),
    )


def _compare(
    row: AliasRow,
    before: AliasRow,
    *,
    settings: Settings,
    verify: Verifier,
    num_clips: int | None,
    console: Console,
    force: bool,
) -> Verification | None:
    """The candidate against what is in use; None where that cannot be and `force` goes on without."""
    candidate = replace(settings, model=row.target)
    try:
        _require_as_it_was(before)
        return verify(
            candidate,
            against=settings.preset,
            against_model=before.target,
            num_clips=num_clips,
            console=console,
        )
    except Busy:
        raise  # the change could not be recorded either
    except VgbatchError as error:
        if not force:
            hints = [error.hint, "`--force` promotes without comparing"]
            raise type(error)(error.message, hint="; ".join(hint for hint in hints if hint)) from error
        line(console, f"not compared: {error.message}")
        return None


def _require_as_it_was(row: AliasRow) -> None:
    """Raises ModelError unless what a row points at is still there, of the same revision."""
    alias = row.alias
    find_model(alias, aliases=Aliases(targets={alias: row.target}, revisions={alias: row.revision}))


def _record(row: AliasRow, *, before: AliasRow | None, settings: Settings) -> AliasRow:
    """Adds a row under the lock, if `before` still is the alias's latest."""
    require_writable(settings.out)
    require_writable(settings.ledger.parent)
    with run_lock(out=settings.out, ledger=settings.ledger, run_id=new_run_id()):
        ledger = Ledger(settings.ledger)
        ledger.create()
        if latest_changes(ledger).get(row.alias) != before:
            raise UsageError(
                f"another command has moved the alias meanwhile: {row.alias}",
                hint=f"see `vgbatch models history {row.alias}`, then try again",
            )
        ledger.add_alias(row)
    return row
