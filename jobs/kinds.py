"""The kinds of settings: each function takes a value as it was written and gives it checked, or refuses.

Values come as text from the environment, typed from flags and from the configuration file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo

from cost.instants import parse_timezone
from cost.prices import parse_price, parse_utilization
from manifests.errors import UsageError

PREFIX = "VGBATCH_"
FILE_RANK = 2

ENCODER_PRESETS = (
    "ultrafast",
    "superfast",
    "veryfast",
    "faster",
    "fast",
    "medium",
    "slow",
    "slower",
    "veryslow",
    "placebo",
)


VALID_ALIAS = (
    "1 to 64 letters a to z, digits, `.`, `_` and `-`, a letter or digit first; "
    "neither a path, nor a hub id, nor `builtin`"
)
# ASCII alone: an alias decides which weights a night renders with, and letters of other scripts can look
# like another alias.
_ALIAS = re.compile(r"(?!builtin\Z)[a-z0-9][a-z0-9._-]{0,63}", re.ASCII | re.IGNORECASE)
_SWITCHES = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_MAX_SHOWN = 60


class Value(NamedTuple):
    """A setting as written. source: for `origins`. origin: for messages. folder: where relative paths
    start. rank: the lowest wins: flags 0, variables 1, the file FILE_RANK."""

    value: object
    source: str
    origin: str
    folder: Path
    rank: int

    def refused(self, valid: str) -> UsageError:
        return UsageError(f"{self.origin}: {shown(self.value)}", hint=f"valid: {valid}")


def path(given: Value) -> Path:
    text = str(given.value) if isinstance(given.value, Path) else _text(given, valid="a path")
    try:
        return given.folder / Path(text).expanduser()
    except RuntimeError:
        raise given.refused("a path; `~` needs a home folder") from None


def model(given: Value) -> str:
    """The text as it is; in the configuration file, a folder beside it goes first."""
    text = _text(given, valid="an alias, a local folder, or a hub id with @revision")
    try:
        beside = given.folder / Path(text).expanduser()
        return str(beside) if given.rank == FILE_RANK and beside.is_dir() else text
    except (OSError, RuntimeError):  # too long for a path, `~` without a home folder
        return text


def is_alias(name: str) -> bool:
    """Whether it can name a model without being another one's name already."""
    return _ALIAS.fullmatch(name) is not None


def crf(given: Value) -> int:
    # 0 is lossless, which libx264 refuses in the High profile that players need.
    text = "" if isinstance(given.value, bool) else str(given.value)
    if not re.fullmatch(r"\d{1,2}", text, re.ASCII) or not 1 <= int(text) <= 51:
        raise given.refused("a whole number from 1 (best) to 51")
    return int(text)


def one_of(*choices: str) -> Callable[[Value], str]:
    def parse(given: Value) -> str:
        if given.value not in choices:
            near = get_close_matches(str(given.value), choices, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise given.refused(", ".join(choices) + meant)
        return str(given.value)

    return parse


def switch(given: Value) -> bool:
    if isinstance(given.value, bool):
        return given.value
    if given.origin.startswith(PREFIX) and str(given.value).lower() in _SWITCHES:
        return _SWITCHES[str(given.value).lower()]
    raise given.refused("true or false")


def tags(given: Value) -> tuple[str, ...]:
    return tuple(_items(given, valid="names of columns"))


def price(given: Value) -> Decimal:
    return parse_price(str(given.value), flag=given.origin)


def utilization(given: Value) -> Decimal:
    return parse_utilization(str(given.value), flag=given.origin)


def zone(given: Value) -> ZoneInfo:
    return parse_timezone(str(given.value), flag=given.origin)


def devices(given: Value) -> str:
    """Names joined by commas. `cpu` may be repeated: each is a worker."""
    valid = "auto, cpu, or cards such as cuda:0,cuda:1, each once"
    items = _items(given, valid=valid)
    cards = {item for item in items if re.fullmatch(r"cuda:(0|[1-9]\d{0,2})", item, re.ASCII)}
    if items != ["auto"] and set(items) != {"cpu"} and len(cards) != len(items):
        raise given.refused(valid)
    return ",".join(items)


def shown(value: object) -> str:
    """For messages: quoted, and not endless."""
    text = repr(str(value) if isinstance(value, Path | Decimal) else value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _text(given: Value, *, valid: str) -> str:
    if not isinstance(given.value, str) or not given.value.strip() or "\0" in given.value:
        raise given.refused(valid)
    return given.value


def _items(given: Value, *, valid: str) -> list[str]:
    """Of a list, or of a text with commas."""
    items = given.value.split(",") if isinstance(given.value, str) else given.value
    if not isinstance(items, list | tuple) or not items:
        raise given.refused(valid)
    if not all(isinstance(item, str) and item.strip() for item in items):
        raise given.refused(valid)
    return [item.strip() for item in items]
