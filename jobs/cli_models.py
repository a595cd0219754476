"""`vgbatch models`: names for revisions of models. Imports are inside the commands, see cli_options.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli_options import (
    AliasArg,
    ClipsOpt,
    DevicesOpt,
    JsonOpt,
    LedgerOpt,
    ModelArg,
    OutOpt,
    messages,
    output,
    print_json,
    resolve_settings,
)
from manifests.presets import PRESETS

if TYPE_CHECKING:
    from jobs.registry import Change

models_app = typer.Typer(
    help="Give models names, and point a name at another revision once it is no worse.",
    no_args_is_help=True,
)


@models_app.command("list")
def models_list(out: OutOpt = None, ledger: LedgerOpt = None, as_json: JsonOpt = False) -> None:
    """The aliases of the ledger and of vgbatch.toml, and what they point at."""
    from jobs.registry_table import list_facts, show_list

    facts = list_facts(resolve_settings(out=out, ledger=ledger))
    if as_json:
        print_json(facts)
    else:
        show_list(facts, output())


@models_app.command("history")
def models_history(
    alias: AliasArg, out: OutOpt = None, ledger: LedgerOpt = None, as_json: JsonOpt = False
) -> None:
    """Every change of an alias, oldest first."""
    from jobs.registry import history
    from jobs.registry_table import history_facts, show_history

    facts = history_facts(history(alias, settings=resolve_settings(out=out, ledger=ledger)))
    if as_json:
        print_json(facts)
    else:
        show_history(facts, output())


@models_app.command("add")
def models_add(
    alias: AliasArg,
    model: ModelArg,
    out: OutOpt = None,
    ledger: LedgerOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Register an alias of the revision that a model has now."""
    from jobs.registry import add

    made = add(alias, model, settings=resolve_settings(out=out, ledger=ledger))
    raise typer.Exit(_show_change(made, as_json=as_json))


@models_app.command("promote")
def models_promote(
    alias: AliasArg,
    model: ModelArg,
    preset: Annotated[
        str | None,
        typer.Option("--preset", help=f"Compare in this preset: {', '.join(PRESETS)} (default: exact)."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Promote a worse one, or what cannot be compared.")
    ] = False,
    clips: ClipsOpt = None,
    out: OutOpt = None,
    ledger: LedgerOpt = None,
    devices: DevicesOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Point an alias at another revision, if `verify` finds it no worse than the one in use."""
    from jobs.registry import promote
    from jobs.verification.table import show_verification
    from jobs.verification.verify import verify as run_verify

    settings = resolve_settings(out=out, ledger=ledger, preset=preset, devices=devices)
    made = promote(
        alias,
        model,
        settings=settings,
        verify=run_verify,
        console=messages(),
        force=force,
        num_clips=clips,
    )
    if made.verification is not None and not as_json:
        show_verification(made.verification.facts, output(), page=made.verification.page)
    raise typer.Exit(_show_change(made, as_json=as_json))


@models_app.command("rollback")
def models_rollback(
    alias: AliasArg, out: OutOpt = None, ledger: LedgerOpt = None, as_json: JsonOpt = False
) -> None:
    """Point an alias back at what it pointed at before its last promotion; again, one further back."""
    from jobs.registry import rollback

    made = rollback(alias, settings=resolve_settings(out=out, ledger=ledger))
    raise typer.Exit(_show_change(made, as_json=as_json))


def _show_change(change: Change, *, as_json: bool) -> int:
    from jobs.registry_table import change_facts, show_change

    if as_json:
        print_json(change_facts(change))
    else:
        show_change(change, output())
    return change.exit_code
