"""Defaults and limits of the published Wan families, and what a checkpoint's vgbatch.json changes of them.

No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from manifests.errors import ModelError
from pipeline.models.checkpoint import OVERRIDES_FILE, Checkpoint

# Published with every Wan release as what to steer away from.
WAN_NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，"
    "形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)

_LANDSCAPES = {"480p": (832, 480), "720p": (1280, 720), "768p": (1344, 768)}

# Wan was trained on clips of 5 s; four times that is far past where it still holds a scene together.
_MAX_SIDE = 2048
_MAX_FRAMES = 481


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a job gets when it does not say, and what it may ask for. Field names are vgbatch.json's keys.

    resolutions: (width, height) by name. max_frames: rendered frames.
    """

    display_name: str
    width: int
    height: int
    num_frames: int
    fps: Fraction
    steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    flow_shift: float
    negative_prompt: str
    resolutions: Mapping[str, tuple[int, int]]
    min_side: int
    max_side: int
    max_frames: int


def defaults_of(checkpoint: Checkpoint) -> Defaults:
    """The published defaults of the checkpoint's family, with its own overrides. Raises ModelError."""
    return _overridden(_published(checkpoint), checkpoint)


def _published(checkpoint: Checkpoint) -> Defaults:
    wan21 = Defaults(
        display_name=checkpoint.label,
        width=832,
        height=480,
        num_frames=81,
        fps=Fraction(16),
        steps=50,
        guidance_scale=5.0,
        guidance_scale_2=None,
        flow_shift=checkpoint.flow_shift,
        negative_prompt=WAN_NEGATIVE_PROMPT,
        resolutions=_resolutions(checkpoint.patch_pixels),
        min_side=checkpoint.patch_pixels,
        max_side=min(_MAX_SIDE, checkpoint.longest_axis * checkpoint.patch_pixels),
        max_frames=min(_MAX_FRAMES, (checkpoint.longest_axis - 1) * checkpoint.temporal + 1),
    )
    if checkpoint.two_experts:  # Wan2.2 A14B
        return replace(wan21, width=1280, height=720, steps=40, guidance_scale=4.0, guidance_scale_2=3.0)
    if checkpoint.expand_timesteps:  # Wan2.2 TI2V 5B
        return replace(wan21, width=1280, height=704, num_frames=121, fps=Fraction(24))
    return wan21


def _resolutions(multiple: int) -> dict[str, tuple[int, int]]:
    """Named sizes, rounded down to what the model renders without cropping: 720p is 1280x704 for TI2V."""
    table: dict[str, tuple[int, int]] = {}
    for name, (width, height) in _LANDSCAPES.items():
        width, height = width // multiple * multiple, height // multiple * multiple
        table |= {name: (width, height), f"{name}-portrait": (height, width)}
    return table


def _overridden(defaults: Defaults, checkpoint: Checkpoint) -> Defaults:
    known = {field.name for field in fields(Defaults)}
    if unknown := sorted(set(checkpoint.overrides) - known):
        raise ModelError(
            f"unknown key in {OVERRIDES_FILE} of {checkpoint.label}: {unknown[0]}",
            hint=f"known keys: {', '.join(sorted(known))}",
        )
    values = {key: _parsed(key, value, checkpoint) for key, value in checkpoint.overrides.items()}
    return replace(defaults, **values)


def _parsed(key: str, value: Any, checkpoint: Checkpoint) -> Any:
    expected, parse = _PARSERS.get(key, _POSITIVE_INTEGER)
    try:
        return parse(value)
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(
            f"{key} in {OVERRIDES_FILE} of {checkpoint.label} is not {expected}: {value!r}",
            hint="correct the file, or remove the key to get the family's default",
        ) from error


def _positive_integer(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e6:
        raise ValueError
    return float(value)


def _rate(value: Any) -> Fraction:
    rate = Fraction(str(value))
    if not 1 <= rate <= 240:
        raise ValueError
    return rate


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _sizes(value: Any) -> dict[str, tuple[int, int]]:
    return {
        name: (_positive_integer(width), _positive_integer(height)) for name, (width, height) in value.items()
    }


_Parser = tuple[str, Callable[[Any], Any]]
_POSITIVE_INTEGER: _Parser = ("a whole number of at least 1", _positive_integer)
_NUMBER: _Parser = ("a number of at least 0", _number)
_PARSERS: dict[str, _Parser] = {
    "display_name": ("a text", _text),
    "negative_prompt": ("a text", _text),
    "fps": ('a rate from 1 to 240 such as 24 or "24000/1001"', _rate),
    "guidance_scale": _NUMBER,
    "guidance_scale_2": _NUMBER,
    "flow_shift": _NUMBER,
    "resolutions": ("names with [width, height]", _sizes),
}
