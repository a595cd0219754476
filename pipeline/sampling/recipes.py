"""How weights that were distilled to a few steps are to be sampled: a small TOML for each. No torch here.

Those that were published for Wan are in recipes.toml beside this file, found by hub id. Any other checkpoint
or LoRA says it itself, in a file few_step.toml in its folder, with the same keys:

    name = "for messages and reports"
    sampler = "euler"             # or "renoise", or "checkpoint" for the sampler the checkpoint names
    timesteps = [1000, 750, 500]  # of 1000; or `sigmas`, noise levels from 1; or, before the shift, `indices`
    flow_shift = 5.0              # with `indices`; with "checkpoint" in place of the checkpoint's
    steps = 4                     # with "checkpoint"
    expert_switch = 0.875         # the noise level below which the second expert takes over (default: the
                                  # checkpoint's)
    lora = "few_step"             # of a checkpoint's folder: the LoRA beside it that preset `turbo` takes
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from manifests.errors import ModelError

FILE_NAME = "few_step.toml"
CHECKPOINT, EULER, RENOISE = "checkpoint", "euler", "renoise"

_PUBLISHED = Path(__file__).with_name("recipes.toml")
_TRAINED = 1000  # timesteps of Wan's training
_MOST_STEPS = 50
_LEVELS = ("timesteps", "sigmas", "indices")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A few steps without guidance.

    sampler: CHECKPOINT: the checkpoint's own, with `steps` and flow_shift (None: the model's). EULER: along
    the velocity from each of `sigmas` to the next, at last to 0. RENOISE: to the clean latents, and from
    there, with fresh noise, to the next of `sigmas`.
    expert_switch: the noise level below which the second expert takes over; None: the checkpoint's.
    lora: beside the checkpoint, for a checkpoint that is no few-step one without it.
    """

    name: str
    sampler: str
    steps: int
    sigmas: tuple[float, ...] = ()
    flow_shift: float | None = None
    expert_switch: float | None = None
    lora: str | None = None

    @property
    def revision(self) -> str:
        """Twelve hex digits of all that decides about pixels; of a LoRA its own contents do."""
        decisive = (self.sampler, self.steps, self.sigmas, self.flow_shift, self.expert_switch)
        return sha256(repr(decisive).encode()).hexdigest()[:12]


def published_recipe(repo: str) -> Recipe | None:
    """Of a repository on the hub, `org/name`, checkpoint or LoRA."""
    return _published().get(repo.lower())


def read_recipe(file: Path) -> Recipe:
    """Raises ModelError for a file that is no recipe."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or not TOML
        raise ModelError(f"{file} cannot be read: {error}", hint="correct it, or take it away") from error
    return parse_recipe(table, origin=str(file))


@cache
def _published() -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    for table in tomllib.loads(_PUBLISHED.read_text(encoding="utf-8"))["recipe"]:
        repos = table.pop("for")
        found |= {repo.lower(): parse_recipe(table, origin=str(_PUBLISHED)) for repo in repos}
    return found


def parse_recipe(table: Mapping[str, Any], *, origin: str) -> Recipe:
    """origin: for messages. Raises ModelError."""
    for key, value in table.items():
        if key not in _KEYS:
            raise _refused(origin, key, value, f"one of {', '.join(_KEYS)}")
        valid, accepts = _KEYS[key]
        if not accepts(value):
            raise _refused(origin, key, value, valid)
    for key in ("name", "sampler"):
        if key not in table:
            raise ModelError(f"no {key} in {origin}", hint=f"valid: {_KEYS[key][0]}")
    sampler = table["sampler"]
    _require_steps(table, origin)
    sigmas = _sigmas(table)
    if sigmas and not all(before > after > 0 for before, after in pairwise((*sigmas, sigmas[-1] / 2))):
        raise ModelError(f"noise levels that do not fall in {origin}: {sigmas}", hint="start at 1 and fall")
    return Recipe(
        name=table["name"],
        sampler=sampler,
        steps=table.get("steps") or len(sigmas),
        sigmas=sigmas,
        flow_shift=float(table["flow_shift"]) if sampler == CHECKPOINT and "flow_shift" in table else None,
        expert_switch=table.get("expert_switch"),
        lora=table.get("lora"),
    )


def _require_steps(table: Mapping[str, Any], origin: str) -> None:
    needed = ("steps",) if table["sampler"] == CHECKPOINT else _LEVELS
    given = [key for key in ("steps", *_LEVELS) if key in table]
    if len(given) != 1 or given[0] not in needed:
        raise ModelError(
            f"{' and '.join(given) or 'no steps'} for sampler {table['sampler']} in {origin}",
            hint=f"give exactly one of {', '.join(needed)}",
        )
    if "indices" in table and "flow_shift" not in table:
        raise ModelError(f"indices without flow_shift in {origin}", hint="give the shift of their table")


def _sigmas(table: Mapping[str, Any]) -> tuple[float, ...]:
    if "sigmas" in table:
        return tuple(map(float, table["sigmas"]))
    if "timesteps" in table:
        return tuple(timestep / _TRAINED for timestep in table["timesteps"])
    shift = float(table.get("flow_shift", 1))
    levels = [index / _TRAINED for index in table.get("indices", ())]
    return tuple(shift * level / (1 + (shift - 1) * level) for level in levels)


def _refused(origin: str, key: str, value: object, valid: str) -> ModelError:
    return ModelError(f"{key} in {origin}: {value!r}", hint=f"valid: {valid}")


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: Any, *, least: float, most: float) -> bool:
    return type(value) in (int, float) and least < value <= most


def _are_numbers(value: object, *, most: float) -> bool:
    return (
        isinstance(value, list)
        and 1 <= len(value) <= _MOST_STEPS
        and all(_is_number(one, least=0, most=most) for one in value)
    )


def _are_timesteps(value: Any) -> bool:
    """No schedule starts at one of a thousand: these are noise levels under another key's name."""
    return _are_numbers(value, most=_TRAINED) and max(value) > 1


_TIMESTEPS = (
    f"1 to {_MOST_STEPS} numbers above 0, at most {_TRAINED}, the first above 1; "
    "noise levels from 1 are `sigmas`"
)
_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("a text in one line", lambda value: _is_text(value) and value.isprintable()),
    "sampler": (f"{EULER}, {RENOISE} or {CHECKPOINT}", lambda value: value in (EULER, RENOISE, CHECKPOINT)),
    "timesteps": (_TIMESTEPS, _are_timesteps),
    "indices": (_TIMESTEPS, _are_timesteps),
    "sigmas": (
        f"1 to {_MOST_STEPS} numbers above 0, at most 1",
        lambda value: _are_numbers(value, most=1),
    ),
    "flow_shift": ("a number from 0.01 to 100", lambda value: _is_number(value, least=0.0099, most=100)),
    "steps": (
        f"a whole number from 1 to {_MOST_STEPS}",
        lambda value: type(value) is int and 1 <= value <= _MOST_STEPS,
    ),
    "expert_switch": (
        "a number above 0, at most 1",
        lambda value: _is_number(value, least=0, most=1),
    ),
    "lora": ("a file or folder beside it", lambda value: _is_text(value)),
}
