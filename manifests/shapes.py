"""Sizes and frame counts: what is delivered, and what the model must render for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from manifests.arrays import Floats, Ints, Mask, phrase
from manifests.columns import Given, Rates, durations, texts, whole_numbers
from manifests.model_spec import ModelSpec
from manifests.rows import Rows
from manifests.wording import counted

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Per row: pixels and frames as delivered, and as rendered."""

    width: Ints
    height: Ints
    num_frames: Ints
    render_width: Ints
    render_height: Ints
    render_frames: Ints


@dataclass(frozen=True, kw_only=True)
class RowModels:
    """The models of a batch's rows. codes: index into specs for each row."""

    specs: Sequence[ModelSpec]
    codes: Ints

    def each(self, attribute: str) -> Ints:
        """An integer of each row's model."""
        return np.array([getattr(spec, attribute) for spec in self.specs], np.int64)[self.codes]

    def spec(self, row: int) -> ModelSpec:
        return self.specs[self.codes[row]]

    def each_true(self, attribute: str) -> Mask:
        """Whether each row's model has it."""
        return np.array([bool(getattr(spec, attribute)) for spec in self.specs])[self.codes]

    def each_float(self, attribute: str) -> Floats:
        """A float of each row's model; NaN where it has none."""
        return np.array([getattr(spec, attribute) for spec in self.specs], np.float64)[self.codes]


def shapes(rows: Rows, *, models: RowModels, fps: Rates) -> Shapes:
    """Sizes and frame counts of every row; rows with one that cannot be done are rejected."""
    named, sizes = _named_sizes(rows, models)
    width, render_width = _side(rows, "width", named=named, sizes=sizes[:, 0], models=models)
    height, render_height = _side(rows, "height", named=named, sizes=sizes[:, 1], models=models)
    cropped = (width != render_width) | (height != render_height)
    rows.warn(
        cropped,
        lambda: phrase("rendered at ", render_width, "x", render_height, ", cropped to ", width, "x", height),
    )
    num_frames, asked_by = _delivered_frames(rows, models=models, fps=fps)
    temporal = models.each("temporal")
    render_frames = -(-(num_frames - 1) // temporal) * temporal + 1
    _reject_long(rows, render_frames, models=models, fps=fps, asked_by=asked_by)
    rows.warn(
        num_frames != render_frames,
        lambda: phrase(render_frames, " frames rendered, trimmed to ", num_frames),
    )
    return Shapes(
        width=width,
        height=height,
        num_frames=num_frames,
        render_width=render_width,
        render_height=render_height,
        render_frames=render_frames,
    )


def _named_sizes(rows: Rows, models: RowModels) -> tuple[Mask, Ints]:
    """Which rows give a resolution, and (rows, 2) pixels of it."""
    codes = texts(rows, "resolution").dictionary_encode()
    written = codes.dictionary.to_pylist()
    index = pc.fill_null(codes.indices, len(written)).to_numpy(zero_copy_only=False)
    # (models, distinct texts, 2); the last text stands for null.
    table = np.array(
        [[_parse_resolution(text, spec) for text in written] + [(0, 0)] for spec in models.specs], np.int64
    )
    sizes = table[models.codes, index]
    given = index < len(written)
    unknown = given & (sizes[:, 0] == 0)
    rows.reject(unknown, "resolution", lambda i: _resolutions(models.specs[models.codes[i]]))
    return given & ~unknown, sizes


def _parse_resolution(text: str, spec: ModelSpec) -> tuple[int, int]:
    """(0, 0) when it is neither a size nor a name the model knows."""
    found = re.fullmatch(r"\s*([0-9]{1,9})\s*[xX×*]\s*([0-9]{1,9})\s*", text)
    if found:
        return int(found[1]), int(found[2])
    names = {name.lower(): size for name, size in spec.resolutions.items()}
    return names.get(text.strip().lower(), (0, 0))


def _resolutions(spec: ModelSpec) -> str:
    known = ", ".join(f"`{name}`" for name in spec.resolutions)
    return "must be a size like `1344x768`" + (f" or a name of {spec.name}: {known}" if known else "")


def _side(rows: Rows, name: str, *, named: Mask, sizes: Ints, models: RowModels) -> tuple[Ints, Ints]:
    """A side as delivered and as rendered; rejects what is odd, too small or too large.

    named: rows that give a resolution; sizes: its pixels on this side.
    """
    column = whole_numbers(rows, name, low=1, high=_INT32_MAX, valid="a positive even number of pixels")
    disagrees = named & column.given & (column.values != sizes)
    rows.reject(disagrees, "resolution", lambda i: f"disagrees with {name} {column.values[i]}")
    pixels = column.or_default(np.where(named, sizes, models.each(f"default_{name}")))
    multiple = models.each("multiple")
    rendered = -(-pixels // multiple) * multiple

    def reason(index: int) -> str:
        return _size_reason(int(pixels[index]), name=name, spec=models.specs[models.codes[index]])

    bad = (pixels % 2 == 1) | (pixels < models.each("min_side")) | (rendered > models.each("max_side"))
    rows.reject(bad & named & ~column.given, "resolution", reason)
    rows.reject(bad, name, reason)
    return pixels, rendered


def _size_reason(pixels: int, *, name: str, spec: ModelSpec) -> str:
    smallest = -(-spec.min_side // spec.multiple) * spec.multiple
    largest = spec.max_side // spec.multiple * spec.multiple
    if pixels < spec.min_side:
        return (
            f"{name} {pixels} is too small; {spec.name} renders {smallest} to {largest}; nearest: {smallest}"
        )
    if pixels > largest:
        return (
            f"{name} {pixels} is too large; {spec.name} renders {smallest} to {largest}; nearest: {largest}"
        )
    nearest = [side for side in (pixels - 1, pixels + 1) if smallest <= side <= largest]
    return f"{name} {pixels} is odd; video needs even sides; nearest: {' or '.join(map(str, nearest))}"


def _delivered_frames(rows: Rows, *, models: RowModels, fps: Rates) -> tuple[Ints, Mask]:
    """Frames to deliver, and which rows asked for them by duration."""
    frames = whole_numbers(rows, "num_frames", low=1, high=_INT32_MAX, valid="a whole number of at least 1")
    seconds = durations(rows)
    implied = _frames_of(seconds, fps)
    rows.reject(
        frames.given & seconds.given & (frames.values != implied),
        "duration",
        lambda i: (
            f"disagrees with num_frames {frames.values[i]}: at {_rate_text(fps, i)} fps it is "
            f"{implied[i]} frames; give one of the two"
        ),
    )
    by_duration = seconds.given & ~frames.given
    default = np.where(by_duration, implied, models.each("default_num_frames"))
    return frames.or_default(default), by_duration


def _frames_of(seconds: Given, fps: Rates) -> Ints:
    """max(1, round half up (seconds x fps)) in whole numbers, so that no half is lost to a float."""
    whole, rest_ns = np.divmod(seconds.values, 10**9)
    frames, rest = np.divmod(whole * fps.num, fps.den)
    # What is left is (rest + rest_ns x num / 10^9) / den frames; no product here passes 2^53.
    billionths = rest * 10**9 + rest_ns * fps.num
    return np.maximum(1, frames + (2 * billionths + fps.den * 10**9) // (2 * fps.den * 10**9))


def _reject_long(rows: Rows, render_frames: Ints, *, models: RowModels, fps: Rates, asked_by: Mask) -> None:
    long = render_frames > models.each("max_frames")

    def reason(index: int) -> str:
        spec = models.specs[models.codes[index]]
        most = (spec.max_frames - 1) // spec.temporal * spec.temporal + 1
        seconds = most * fps.den[index] / fps.num[index]
        at_most = f"at most {counted(most, 'frame')}, {seconds:.3g} s at {_rate_text(fps, index)} fps"
        return f"too long; {spec.name} renders {at_most}"

    rows.reject(long & asked_by, "duration", reason)
    rows.reject(long, "num_frames", reason)


def _rate_text(fps: Rates, index: int) -> str:
    num, den = fps.num[index], fps.den[index]
    return str(num) if den == 1 else f"{num}/{den}"
