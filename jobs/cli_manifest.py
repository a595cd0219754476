"""`vgbatch manifest`: an example, and conversions. Imports are inside the commands, see cli_options.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jobs.cli_options import (
    JsonOpt,
    ModelOpt,
    OverwriteOpt,
    TagOpt,
    messages,
    print_json,
    resolve_settings,
)
from manifests.wording import counted

if TYPE_CHECKING:
    from jobs.config import Settings

manifest_app = typer.Typer(
    help="Write an example manifest, or make one from CSV or JSON lines.", no_args_is_help=True
)


@manifest_app.command("template")
def template(
    target: Annotated[Path, typer.Argument(help="The Parquet file to write.")] = Path("manifest.parquet"),
    overwrite: OverwriteOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Write an example manifest that runs as it is, and explain every column."""
    from manifests.templates import template_facts, write_template

    text = write_template(str(target), overwrite=overwrite)
    if as_json:
        print_json({"manifest": str(target), "columns": template_facts()})
    else:
        print(text, end="")
        print(f"wrote {target}", file=sys.stderr)


@manifest_app.command("from-csv")
def from_csv(
    source: Annotated[Path, typer.Argument(help="A CSV file with a header line.")],
    target: Annotated[Path, typer.Argument(help="The Parquet file to write.")],
    model: ModelOpt = None,
    tag: TagOpt = None,
    overwrite: OverwriteOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Convert CSV to a manifest, with the validation that `run` does."""
    raise typer.Exit(
        _convert("csv", source, target, resolve_settings(model=model, tags=tag), overwrite, as_json)
    )


@manifest_app.command("from-jsonl")
def from_jsonl(
    source: Annotated[Path, typer.Argument(help="A file of JSON objects, one a line.")],
    target: Annotated[Path, typer.Argument(help="The Parquet file to write.")],
    model: ModelOpt = None,
    tag: TagOpt = None,
    overwrite: OverwriteOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Convert JSON lines to a manifest, with the validation that `run` does."""
    raise typer.Exit(
        _convert("jsonl", source, target, resolve_settings(model=model, tags=tag), overwrite, as_json)
    )


def _convert(
    kind: Literal["csv", "jsonl"],
    source: Path,
    target: Path,
    settings: Settings,
    overwrite: bool,
    as_json: bool,
) -> int:
    from jobs.converting import convert
    from jobs.views import show_rejected

    facts = convert(kind, source, target, settings=settings, overwrite=overwrite)
    if as_json:
        print_json(facts)
    else:
        show_rejected(facts["rejected_rows"], messages())
        rows = counted(facts["rows"], "row")
        print(f"wrote {facts['manifest']}: {rows}, {facts['rejected']} of them rejected")
    return 3 if facts["rejected"] else 0
