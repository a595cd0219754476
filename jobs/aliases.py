"""Aliases of models: what each stands for, from the ledger and from the configuration file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from shlex import quote

from jobs.config import Settings
from manifests.errors import ModelError, UsageError
from manifests.job import Weights
from pipeline.models.resolve import ResolvedModel, resolve_model
from storage.ledger import Ledger
from storage.rows import AliasRow

SHORT_DIGITS = 12  # of a revision, for people


@dataclass(frozen=True, kw_only=True)
class Aliases:
    """targets: by alias. revisions: what the targets of those in the ledger must be found to be."""

    targets: Mapping[str, str] = field(default_factory=dict)
    revisions: Mapping[str, str] = field(default_factory=dict)


def read_aliases(settings: Settings) -> Aliases:
    """Of the ledger, where there is one, and of the configuration file. UsageError where both define one."""
    registered = latest_changes(Ledger(settings.ledger))
    for clash in clashes(registered, settings=settings):
        raise UsageError(clash, hint=f"rename or remove the one in {settings.config_file}")
    return Aliases(
        targets={**settings.aliases, **{alias: row.target for alias, row in registered.items()}},
        revisions={alias: row.revision for alias, row in registered.items()},
    )


def latest_changes(ledger: Ledger) -> dict[str, AliasRow]:
    """What each alias of a ledger points at, in the order of their names; none without a ledger."""
    latest = {row.alias: row for row in ledger.alias_changes()} if ledger.exists() else {}
    return dict(sorted(latest.items()))


def clashes(registered: Mapping[str, AliasRow], *, settings: Settings) -> Iterator[str]:
    """A sentence for each alias that both the ledger and the configuration file define."""
    for alias, target in settings.aliases.items():
        twin = same_name(alias, registered)
        if twin is not None:
            yield (
                f"an alias is defined twice: {twin} is {registered[twin].target} in the ledger "
                f"{settings.ledger}, {alias} is {target} in [models] of {settings.config_file}"
            )


def same_name(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that people would take for `name`: it may be in other case."""
    return next((other for other in names if other.casefold() == name.casefold()), None)


def find_model(
    weights: Weights | str, *, aliases: Aliases, pinned_revision: str | None = None
) -> ResolvedModel:
    """As `resolve_model`; of an alias in the ledger, only at the revision that it points at."""
    name = weights if isinstance(weights, str) else weights.model
    try:
        resolved = resolve_model(weights, pinned_revision=pinned_revision, aliases=aliases.targets)
    except ModelError as error:
        if (meant := _meant(name, aliases.targets)) is None:
            raise
        raise ModelError(error.message, hint=f"did you mean the alias `{meant}`?") from error
    found, wanted = resolved.source.base_revision, aliases.revisions.get(name)
    if wanted is not None and found != wanted:
        target = aliases.targets[name]
        raise ModelError(
            f"the alias {name} points at revision {wanted[:SHORT_DIGITS]}, but the contents have changed to "
            f"{found[:SHORT_DIGITS]}: {target}",
            hint="put the old contents back, or take the new ones: "
            f"`vgbatch models promote {name} {quote(target)} --force`",
        )
    return resolved


def _meant(name: str, aliases: Mapping[str, str]) -> str | None:
    """The alias that was probably meant by what is neither alias, folder nor hub id."""
    if name in aliases or "/" in name or os.path.exists(name):
        return None
    return same_name(name, aliases) or next(iter(get_close_matches(name, aliases, n=1)), None)
