"""`vgbatch doctor`: is this machine ready for a night of rendering? Each check says what it found."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jobs.config import DEFAULT, Settings, unknown_variables
from jobs.terminal import line
from manifests.errors import Busy, VgbatchError

if TYPE_CHECKING:
    from rich.console import Console

MIN_PYTHON = (3, 11)
LOW_SPACE_BYTES = 10 * 2**30  # about a thousand clips of 5 s at 768p
PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "safetensors",
    "sentencepiece",
    "tokenizers",
    "ftfy",
    "huggingface-hub",
    "numpy",
    "pyarrow",
    "duckdb",
    "typer",
    "rich",
    "tzdata",
    "imageio-ffmpeg",
)
FLASH_ATTENTION = "fa3-fwd"
# How storage.checks begins what is no damage.
_PENDING_SPOOL = "outcomes still in a spool"

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding. failed: a run would not work. warning: it would, but look here. hint: what to do."""

    name: str
    state: State
    detail: str
    hint: str | None = None


def run_checks(settings: Settings, *, environ: Mapping[str, str] = os.environ) -> list[Check]:
    """Every check, in the order they are printed. Writes nothing that stays; loads torch."""
    return [
        _python(),
        _vgbatch(),
        *_packages(),
        _flash_attention(),
        *_devices(settings),
        _ffmpeg(),
        _output_folder(settings.out),
        _free_space(settings.out),
        _home(environ),
        *_ledger(settings.ledger),
        *_configuration(settings, environ),
    ]


def print_checks(checks: list[Check], console: Console, *, as_json: bool) -> None:
    if as_json:
        _print_json(console, {"checks": [asdict(check) for check in checks]})
        return
    width = max(len(check.name) for check in checks)
    for check in checks:
        line(console, f"{check.state:<7}  {check.name:<{width}}  {check.detail}")
        if check.hint:
            line(console, f"{'':<7}  {'':<{width}}  hint: {check.hint}")


def config_values(settings: Settings) -> dict[str, dict[str, str | None]]:
    """By setting: its value as text, None where there is none, and its origin."""
    values: dict[str, dict[str, str | None]] = {}
    for name, origin in settings.origins.items():
        value = getattr(settings, name)
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        values[name] = {"value": None if value is None else text, "origin": origin}
    return values


def print_config(settings: Settings, console: Console, *, as_json: bool) -> None:
    """Every setting with its value and its origin, then the aliases of models."""
    values = config_values(settings)
    if as_json:
        _print_json(console, {"settings": values, "models": dict(settings.aliases)})
        return
    rows = [(name, value["value"] or "-", value["origin"] or "") for name, value in values.items()]
    rows += [(f"models.{alias}", target, "") for alias, target in settings.aliases.items()]
    names, shown, _ = (max(len(cell) for cell in column) for column in zip(*rows, strict=True))
    for name, value, origin in rows:
        line(console, f"{name:<{names}}  {value:<{shown}}  {origin}".rstrip())


def _python() -> Check:
    if sys.version_info >= MIN_PYTHON:
        return Check(name="python", state="ok", detail=platform.python_version())
    needed = ".".join(map(str, MIN_PYTHON))
    return Check(
        name="python", state="failed", detail=platform.python_version(), hint=f"install {needed} or newer"
    )


def _vgbatch() -> Check:
    try:
        detail = version("vgbatch")
    except PackageNotFoundError:
        detail = f"not installed, run from {Path(__file__).parent.parent}"
    return Check(name="vgbatch", state="ok", detail=detail)


def _packages() -> Iterator[Check]:
    for name in PACKAGES:
        try:
            yield Check(name=name, state="ok", detail=version(name))
        except PackageNotFoundError:
            yield Check(
                name=name, state="failed", detail="not installed", hint="`pip install vgbatch` brings it"
            )


def _flash_attention() -> Check:
    try:
        detail = version(FLASH_ATTENTION)
    except PackageNotFoundError:
        detail = "not installed (optional, faster attention on Hopper cards)"
    return Check(name=FLASH_ATTENTION, state="ok", detail=detail)


def _devices(settings: Settings) -> Iterator[Check]:
    try:
        from pipeline.devices import device_memory_bytes, device_name, list_devices

        found = list_devices()
        for device in found:
            memory_gib = device_memory_bytes(device) / 2**30
            yield Check(name=device, state="ok", detail=f"{device_name(device)}, {memory_gib:.1f} GiB")
    except Exception as error:  # a broken driver or build of torch raises anything
        hint = "reinstall torch, and check the driver with `nvidia-smi`"
        yield Check(name="devices", state="failed", detail=_one_line(error), hint=hint)
        return
    wanted = settings.devices.split(",")
    missing = sorted({device for device in wanted if device.startswith("cuda:")} - set(found))
    if missing:
        hint = f"{settings.origins['devices']} asks for them; found: {', '.join(found)}"
        yield Check(name="devices", state="failed", detail=f"not found: {', '.join(missing)}", hint=hint)
    elif wanted == ["auto"] and found == ("cpu",):
        hint = "a build of torch with CUDA and a driver are needed for a card"
        yield Check(name="devices", state="warning", detail="no card: clips render on the CPU", hint=hint)


def _ffmpeg() -> Check:
    from storage.ffmpeg import require_encoder

    try:
        name = require_encoder()
    except VgbatchError as error:
        return Check(name="ffmpeg", state="failed", detail=_one_line(error), hint=error.hint)
    return Check(name="ffmpeg", state="ok", detail=f"{name}, with libx264")


def _output_folder(folder: Path) -> Check:
    """Makes no folder: a check must leave nothing behind."""
    existing = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        detail = f"{existing}: {error.strerror}"
        return Check(name="out", state="failed", detail=detail, hint="choose another with `--out`")
    made = "" if existing == folder.absolute() else " (will be made)"
    return Check(name="out", state="ok", detail=f"{folder}{made}, writable")


def _free_space(folder: Path) -> Check:
    from storage.filesystem import free_bytes

    num_bytes = free_bytes(_existing(folder))
    detail = f"{num_bytes / 2**30:.1f} GiB"
    if num_bytes < LOW_SPACE_BYTES:
        hint = "a clip of 5 s at 768p takes about 10 MB"
        return Check(name="free space", state="warning", detail=detail, hint=hint)
    return Check(name="free space", state="ok", detail=detail)


def _home(environ: Mapping[str, str]) -> Check:
    """Where models of the hub are kept: cron and services often have no HOME."""
    variables = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}
    named = next((name for name in variables if environ.get(name)), None)
    if named is not None:
        return _cache_folder(Path(environ[named]) / variables[named], named)
    home = environ.get("HOME", "")
    if home in ("", "/"):
        detail = f"HOME is {home or 'not set'}"
        return Check(name="cache", state="warning", detail=detail, hint="set HOME, or HF_HOME for hub models")
    return _cache_folder(Path(home) / ".cache" / "huggingface" / "hub", "HOME")


def _cache_folder(folder: Path, variable: str) -> Check:
    existing = _existing(folder)
    if not os.access(existing, os.W_OK | os.X_OK):
        detail = f"{folder} ({variable}) cannot be written"
        return Check(
            name="cache", state="warning", detail=detail, hint=f"set {variable} to a folder of yours"
        )
    return Check(name="cache", state="ok", detail=f"{folder} ({variable})")


def _ledger(path: Path) -> Iterator[Check]:
    from storage.ledger import Ledger

    ledger = Ledger(path)
    try:
        if not ledger.exists():
            yield Check(name="ledger", state="ok", detail=f"{path} (made by the first run)")
            return
        problems = ledger.check()
    except Busy as error:
        yield Check(name="ledger", state="warning", detail=error.message, hint=error.hint)
        return
    except (VgbatchError, OSError) as error:
        yield Check(name="ledger", state="failed", detail=_one_line(error), hint=getattr(error, "hint", None))
        return
    for problem in problems:
        state: State = "warning" if problem.startswith(_PENDING_SPOOL) else "failed"
        yield Check(name="ledger", state=state, detail=problem)
    if not problems:
        yield Check(name="ledger", state="ok", detail=f"{path}, nothing in it twice")


def _configuration(settings: Settings, environ: Mapping[str, str]) -> Iterator[Check]:
    origins = sorted({origin for origin in settings.origins.values() if origin != DEFAULT})
    detail = f"from {', '.join(origins)}" if origins else "defaults only"
    yield Check(name="configuration", state="ok", detail=f"{detail}; `--config` shows every value")
    for name, near in unknown_variables(environ).items():
        hint = f"did you mean {near}?" if near else None
        yield Check(name="configuration", state="warning", detail=f"nothing reads {name}", hint=hint)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there and may be seen."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _print_json(console: Console, facts: Mapping[str, object]) -> None:
    line(console, json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False))
