"""Settings: flag, else environment, else `vgbatch.toml`, else default; each remembers where it came from.

The file is `vgbatch.toml` in the working folder, or what `VGBATCH_CONFIG` names. Relative paths in it are
relative to its own folder, relative paths in flags and variables to the working folder.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from cost.prices import Prices
from jobs import kinds
from jobs.kinds import FILE_RANK, PREFIX, Value, shown
from manifests.errors import UsageError
from manifests.presets import PRESETS

FILE_NAME = "vgbatch.toml"
FILE_VARIABLE = "VGBATCH_CONFIG"
DEFAULT = "default"
ALIASES = "models"  # the table of aliases in the file
LEDGER_NAME = "vgbatch.duckdb"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a command works with.

    out: folder of clips. ledger: its file. model: a name in `aliases`, a local folder or a hub id.
    crf, encoder_preset: of libx264. strict: any warned or rejected row stops the run. tags: columns that
    are tags although their names are close to known ones. gpu_price, price_per_video, price_per_second:
    USD. utilization: in (0, 1]. tz: of days and bare dates. devices: `auto`, or names joined by commas.
    origins: for each setting, the flag, the variable, the file it came from, or DEFAULT.
    config_file: the one that was read, where `aliases` come from.
    """

    out: Path
    ledger: Path
    model: str
    preset: str
    crf: int
    encoder_preset: str
    strict: bool
    tags: tuple[str, ...]
    gpu_price: Decimal | None
    price_per_video: Decimal | None
    price_per_second: Decimal | None
    utilization: Decimal | None
    tz: ZoneInfo
    devices: str
    aliases: Mapping[str, str]
    origins: Mapping[str, str]
    config_file: Path | None = None

    @property
    def prices(self) -> Prices:
        return Prices(
            gpu_per_hour=self.gpu_price,
            per_video=self.price_per_video,
            per_second=self.price_per_second,
            utilization=self.utilization,
        )


def resolve(flags: Mapping[str, object], *, environ: Mapping[str, str], folder: Path) -> Settings:
    """flags: values by setting name, None where not given. folder: the working folder.

    UsageError names the origin, the value and what would be valid. A flag or variable that gives one of
    price_per_video and price_per_second goes before a file that gives the other.
    """
    file = _read_file(environ, folder)
    sources = (_from_flags(flags, folder), _from_environ(environ, folder), file.values)
    given = {name: next((source[name] for source in sources if name in source), None) for name in _SETTINGS}
    _drop_overridden_price(given)
    values = {name: _SETTINGS[name](value) for name, value in given.items() if value is not None}
    out = values.get("out", folder / "out")
    return Settings(
        **{"out": out, "ledger": out / LEDGER_NAME, **_DEFAULTS, **values},
        aliases=file.aliases,
        config_file=file.path,
        origins={name: DEFAULT if value is None else value.source for name, value in given.items()},
    )


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """VGBATCH_ variables that nothing reads, each with the one that was probably meant."""
    known = [FILE_VARIABLE, *(_variable(name) for name in _SETTINGS)]
    # Compared without what all of them share, which would make any two close.
    endings = [name.removeprefix(PREFIX) for name in known]
    return {
        name: next(
            (PREFIX + near for near in get_close_matches(name.removeprefix(PREFIX), endings, n=1)), None
        )
        for name in environ
        if name.startswith(PREFIX) and name not in known
    }


class _File(NamedTuple):
    values: Mapping[str, Value]
    aliases: Mapping[str, str]
    path: Path | None = None


def _from_flags(flags: Mapping[str, object], folder: Path) -> dict[str, Value]:
    assert not flags.keys() - _SETTINGS.keys(), flags.keys() - _SETTINGS.keys()
    names = {name: "--tag" if name == "tags" else "--" + name.replace("_", "-") for name in flags}
    return {
        name: Value(value, names[name], names[name], folder, rank=0)
        for name, value in flags.items()
        if value is not None
    }


def _from_environ(environ: Mapping[str, str], folder: Path) -> dict[str, Value]:
    variables = {name: _variable(name) for name in _SETTINGS}
    return {
        name: Value(environ[variable], variable, variable, folder, rank=1)
        for name, variable in variables.items()
        if environ.get(variable)
    }


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _read_file(environ: Mapping[str, str], folder: Path) -> _File:
    named = environ.get(FILE_VARIABLE)
    path = folder / (named or FILE_NAME)
    if not named and not path.exists():
        return _File({}, {})
    try:
        with path.open("rb") as file:
            table = tomllib.load(file, parse_float=Decimal)
    except OSError as error:
        raise UsageError(
            f"configuration file cannot be read: {path}: {os.strerror(error.errno or 0)}",
            hint=f"`{FILE_VARIABLE}` names it" if named else None,
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"configuration file is not valid TOML: {path}: {error}") from error
    _refuse_unknown_keys(table, path)
    aliases = _aliases(table.pop(ALIASES, {}), path)
    values = {
        name: Value(value, str(path), f"{name} in {path}", path.parent, rank=FILE_RANK)
        for name, value in table.items()
    }
    return _File(values, aliases, path)


def _refuse_unknown_keys(table: Mapping[str, object], path: Path) -> None:
    known = [*_SETTINGS, ALIASES]
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"valid: {', '.join(known)}"
            raise UsageError(f"unknown key in {path}: {key}", hint=hint)


def _aliases(table: object, path: Path) -> dict[str, str]:
    if not isinstance(table, dict):
        raise UsageError(f"{ALIASES} in {path}: {shown(table)}", hint=f"valid: a table, `[{ALIASES}]`")
    if (odd := next((alias for alias in table if not kinds.is_alias(alias)), None)) is not None:
        raise UsageError(
            f"not a name for an alias, {ALIASES} in {path}: {shown(odd)}", hint=f"valid: {kinds.VALID_ALIAS}"
        )
    values = {
        alias: Value(target, str(path), f"{ALIASES}.{alias} in {path}", path.parent, rank=FILE_RANK)
        for alias, target in table.items()
    }
    return {alias: kinds.model(value) for alias, value in values.items()}


def _drop_overridden_price(given: dict[str, Value | None]) -> None:
    """Of a price per video and one per second the origin that goes first wins; from one origin, neither."""
    video, second = given["price_per_video"], given["price_per_second"]
    if video is None or second is None:
        return
    if video.rank == second.rank:
        raise UsageError(
            f"{video.origin} and {second.origin} were both given: {video.value} and {second.value}",
            hint="a clip earns either per video or per second: give one of them",
        )
    given["price_per_second" if video.rank < second.rank else "price_per_video"] = None


_SETTINGS: dict[str, Callable[[Value], Any]] = {
    "out": kinds.path,
    "ledger": kinds.path,
    "model": kinds.model,
    "preset": kinds.one_of(*PRESETS),
    "crf": kinds.crf,
    "encoder_preset": kinds.one_of(*kinds.ENCODER_PRESETS),
    "strict": kinds.switch,
    "tags": kinds.tags,
    "gpu_price": kinds.price,
    "price_per_video": kinds.price,
    "price_per_second": kinds.price,
    "utilization": kinds.utilization,
    "tz": kinds.zone,
    "devices": kinds.devices,
}
SETTING_NAMES = frozenset(_SETTINGS)
_DEFAULTS: dict[str, Any] = {
    "model": "builtin",
    "preset": "exact",
    "crf": 18,
    "encoder_preset": "medium",
    "strict": False,
    "tags": (),
    "gpu_price": None,
    "price_per_video": None,
    "price_per_second": None,
    "utilization": None,
    "tz": ZoneInfo("UTC"),
    "devices": "auto",
}
