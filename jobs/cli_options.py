"""What the commands share: their options, and how these become settings and output.

Imports are inside the functions, so that `vgbatch --help` is instant.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.terminal import open_console
from manifests.errors import UsageError
from manifests.presets import PRESETS

if TYPE_CHECKING:
    from rich.console import Console

    from jobs.config import Settings
    from jobs.models import Models
    from jobs.prepare import Selection

AliasArg = Annotated[str, typer.Argument(metavar="ALIAS", help="The name, such as prod.")]
ModelArg = Annotated[
    str, typer.Argument(metavar="MODEL", help="A local folder, a hub id, `builtin`, or another alias.")
]
ManifestArg = Annotated[str, typer.Argument(help="A Parquet file, a folder of them, or a glob.")]
OutOpt = Annotated[Path | None, typer.Option("--out", help="Output folder (default: ./out).")]
LedgerOpt = Annotated[
    Path | None, typer.Option("--ledger", help="Ledger file (default: <out>/vgbatch.duckdb).")
]
OverwriteOpt = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
ModelOpt = Annotated[
    str | None,
    typer.Option(
        "--model", help="Alias, local folder, or hub id with @revision (default: the built-in model)."
    ),
]
PresetOpt = Annotated[
    str | None,
    typer.Option("--preset", help=f"Default preset of rows: {', '.join(PRESETS)} (default: exact)."),
]
CrfOpt = Annotated[int | None, typer.Option("--crf", help="libx264 quality, 1 (best) to 51 (default: 18).")]
EncoderPresetOpt = Annotated[
    str | None, typer.Option("--encoder-preset", help="libx264 preset (default: medium).")
]
ClipsOpt = Annotated[
    int | None,
    typer.Option(
        "--clips", min=1, max=100_000, help="Compare so many (default: 600 captions, or all prompts)."
    ),
]
DevicesOpt = Annotated[
    str | None,
    typer.Option("--devices", help="auto, cpu, or a list such as cuda:0,cuda:1 (default: auto)."),
]
StrictOpt = Annotated[
    bool | None, typer.Option("--strict", help="Any warned or rejected row: exit 2, nothing runs.")
]
TagOpt = Annotated[
    list[str] | None,
    typer.Option("--tag", help="Declare a column a tag although its name is close to a known one."),
]
LimitOpt = Annotated[int | None, typer.Option("--limit", min=1, help="Render at most this many jobs.")]
SelectOpt = Annotated[list[str] | None, typer.Option("--select", help="Only this job: id=NAME. Repeatable.")]
RefreshOpt = Annotated[
    list[str] | None,
    typer.Option("--refresh", help="Render again what another `model` revision or `numerics` version made."),
]


def resolve_settings(**flags: object) -> Settings:
    from jobs.config import resolve

    given = {name: value for name, value in flags.items() if value is not None}
    return resolve(given, environ=os.environ, folder=Path.cwd())


def parse_selection(limit: int | None, select: list[str] | None, refresh: list[str] | None) -> Selection:
    from jobs.prepare import Selection

    for what in refresh or []:
        if what not in ("model", "numerics"):
            raise UsageError(f"--refresh: {what}", hint="valid: `--refresh model`, `--refresh numerics`")
    ids = []
    for item in select or []:
        name, equals, value = item.partition("=")
        if name != "id" or not equals:
            raise UsageError(f"--select: {item}", hint="valid: `--select id=NAME`")
        ids.append(value)
    return Selection(limit=limit, select=tuple(ids), refresh=frozenset(refresh or []))


def output() -> Console:
    return open_console(sys.stdout)


def messages() -> Console:
    return open_console(sys.stderr)


def print_json(facts: Mapping[str, Any]) -> None:
    print(json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False))


def command_line() -> str:
    return " ".join(["vgbatch", *sys.argv[1:]])


def announce(models: Models) -> None:
    for line in models.announcements():
        print(line, file=sys.stderr)
