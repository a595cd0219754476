"""Procedural scenes: what the built-in model is trained on, and the ground truth it is judged by.

A scene is one main object that moves in one way in front of a plain or graded background, at times with a
smaller, still companion in a corner. Scenes come in batches, as arrays of numbers drawn from one seeded
generator; render.py draws them and captions.py describes them. No torch here.

Shapes: N scenes, F frames. Lengths are pixels of the picture that the scenes were made for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from pipeline.quality.colours import COLOUR_RGB

NUM_FRAMES = 17
FPS = 8

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "heart")
SIZES = ("small", "medium", "large")
MOTIONS = (
    "still",
    "left",
    "right",
    "up",
    "down",
    "diagonal",
    "bounce",
    "circle",
    "grow",
    "shrink",
    "rotate",
)
DIAGONALS = ((-1, -1), (1, -1), (-1, 1), (1, 1))  # upper left, upper right, lower left, lower right
CORNERS = DIAGONALS

COLOURS = tuple(COLOUR_RGB)  # of objects; backgrounds can be gray too
BACKGROUNDS = (*COLOURS, "gray")
BACKGROUND_RGB = np.array([*COLOUR_RGB.values(), (128, 128, 128)], np.float32)

REACH = 1.2  # how far a shape of radius 1 gets from its centre at most
_MARGIN = 2.0  # between an object and the edge of the picture or another object
_CONTRAST = 110.0  # least distance in RGB between an object and anything behind it
_RADII = np.array([(7.5, 9.0), (10.0, 11.5), (13.0, 14.5)])  # by size, where the shorter side is 64
_GROWN_RADII = (13.0, 16.0)
_COMPANION_RADII = (4.5, 5.5)
_HELD_OUT_IN = 10  # one in so many (colour, shape, motion) is never trained on

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """N scenes of one picture size. Names are indices into this module's tables.

    background: (N, 2) indices into BACKGROUNDS, the same twice for a plain one, else the two ends.
    axis: 0 where it is graded from the top down, 1 from left to right. direction: of a diagonal, into
    DIAGONALS. has_companion decides whether the companion's shape, colour and corner mean anything.
    centres: (N, 2, F, 2) x and y of main object and companion. radii, angles: (N, 2, F); a companion that
    is not there has radius 0.
    """

    width: int
    height: int
    shape: Ints
    colour: Ints
    size: Ints
    motion: Ints
    direction: Ints
    background: Ints
    axis: Ints
    has_companion: npt.NDArray[np.bool_]
    companion_shape: Ints
    companion_colour: Ints
    companion_corner: Ints
    centres: Floats
    radii: Floats
    angles: Floats

    def __len__(self) -> int:
        return len(self.shape)

    def truth(self, index: int) -> tuple[str, str, str]:
        """The names of colour, shape and motion of one scene's main object."""
        return (
            COLOURS[self.colour[index]],
            SHAPES[self.shape[index]],
            MOTIONS[self.motion[index]],
        )


def is_held_out(colour: Ints, shape: Ints, motion: Ints) -> npt.NDArray[np.bool_]:
    """Which combinations are kept for evaluation. Every pair of the three is still trained on."""
    return (colour + 3 * shape + 7 * motion) % _HELD_OUT_IN == 0


def sample_scenes(
    rng: np.random.Generator, num_scenes: int, *, width: int, height: int, held_out: bool = False
) -> Scenes:
    """Scenes of attributes that training shows, or only of those that it never shows.

    width, height: at least 64. The draw depends on the generator's state and the arguments alone.
    """
    assert min(width, height) >= 64, (width, height)
    shape, colour, motion, background = _sample_names(rng, num_scenes, held_out)
    size = rng.integers(len(SIZES), size=num_scenes)
    direction = rng.integers(len(DIAGONALS), size=num_scenes)
    path, radius, angle = _sample_paths(rng, size, motion, direction, width, height)
    corner, corner_radius, corner_centre, fits = _sample_corners(rng, path, radius, width, height)
    behind = _visible_colours()[background]
    companion_colour = _choose(rng, behind & (np.arange(len(COLOURS)) != colour[:, None]))
    present = fits & (companion_colour >= 0) & (rng.random(num_scenes) < 0.45)
    companion_radius = np.where(present, corner_radius, 0.0)[:, None].repeat(NUM_FRAMES, 1)
    ends, axes = _backgrounds()
    return Scenes(
        width=width,
        height=height,
        shape=shape,
        colour=colour,
        size=size,
        motion=motion,
        direction=direction,
        background=ends[background],
        axis=axes[background],
        has_companion=present,
        companion_shape=rng.integers(len(SHAPES), size=num_scenes),
        companion_colour=companion_colour,
        companion_corner=corner,
        centres=np.stack([path, corner_centre[:, None].repeat(NUM_FRAMES, 1)], 1).astype(np.float32),
        radii=np.stack([radius, companion_radius], 1).astype(np.float32),
        angles=np.stack([angle, np.zeros_like(angle)], 1).astype(np.float32),
    )


def _sample_names(rng: np.random.Generator, num_scenes: int, held_out: bool) -> tuple[Ints, Ints, Ints, Ints]:
    """Shape, colour, motion and the number of a background that all of the colour stands out from."""
    names: list[tuple[Ints, ...]] = []
    while sum(len(kept[0]) for kept in names) < num_scenes:
        draws = 2 * num_scenes + 64
        shape = rng.integers(len(SHAPES), size=draws)
        colour = rng.integers(len(COLOURS), size=draws)
        motion = rng.integers(len(MOTIONS), size=draws)
        background = _choose(rng, _visible_colours().T[colour] * _background_weights())
        turns_unseen = (motion == MOTIONS.index("rotate")) & np.isin(
            shape, [SHAPES.index("circle"), SHAPES.index("ring")]
        )
        kept = ~turns_unseen & (is_held_out(colour, shape, motion) == held_out)
        names.append((shape[kept], colour[kept], motion[kept], background[kept]))
    columns = zip(*names, strict=True)
    shape, colour, motion, background = (np.concatenate(column)[:num_scenes] for column in columns)
    return shape, colour, motion, background


@cache
def _backgrounds() -> tuple[Ints, Ints]:
    """Every background: its two ends (K, 2), the plain ones first, and its axis (K,)."""
    plain = [(end, end, 0) for end in range(len(BACKGROUNDS))]
    graded = [
        (start, end, axis)
        for start in range(len(BACKGROUNDS))
        for end in range(len(BACKGROUNDS))
        if start != end
        for axis in (0, 1)
    ]
    table = np.array(plain + graded)
    return table[:, :2], table[:, 2]


@cache
def _visible_colours() -> npt.NDArray[np.bool_]:
    """(K, C): whether an object of a colour stands out from all of a background."""
    ends, _ = _backgrounds()
    start, end = BACKGROUND_RGB[ends[:, 0]], BACKGROUND_RGB[ends[:, 1]]
    mix = np.linspace(0, 1, 17, dtype=np.float32)[:, None, None]
    behind = start * (1 - mix) + end * mix  # 17, K, 3
    objects = BACKGROUND_RGB[: len(COLOURS)]
    distance = np.linalg.norm(behind[:, :, None] - objects, axis=-1)
    return distance.min(0) >= _CONTRAST


@cache
def _background_weights() -> Floats:
    """(K,): one background in four is graded, all alike otherwise."""
    ends, _ = _backgrounds()
    plain = ends[:, 0] == ends[:, 1]
    return np.where(plain, 0.75 / plain.sum(), 0.25 / (~plain).sum()).astype(np.float32)


def _choose(rng: np.random.Generator, weights: npt.NDArray[np.generic]) -> Ints:
    """One column of each row, by weight; -1 where a row has none."""
    totals = np.cumsum(weights.astype(np.float64), axis=1)
    draws = rng.random(len(weights)) * totals[:, -1]
    chosen = (draws[:, None] >= totals).sum(1)
    return np.where(totals[:, -1] > 0, np.minimum(chosen, weights.shape[1] - 1), -1)


def _sample_paths(
    rng: np.random.Generator, size: Ints, motion: Ints, direction: Ints, width: int, height: int
) -> tuple[npt.NDArray[np.float64], ...]:
    """The main object's centres (N, F, 2), radii and angles (N, F), always wholly in the picture."""
    num_scenes, unit = len(size), min(width, height) / 64
    time = np.linspace(0, 1, NUM_FRAMES)
    draws = rng.random((num_scenes, 8))
    low, high = _RADII[size].T
    largest = unit * _between(low, high, draws[:, 0])
    scales = _is(motion, "grow") | _is(motion, "shrink")
    largest = np.where(scales, unit * _between(*_GROWN_RADII, draws[:, 0]), largest)
    radius = largest[:, None] * np.where(scales[:, None], _growth(motion, time), 1.0)

    room = np.array([width, height]) - 2 * (REACH * largest + _MARGIN)[:, None]  # N, 2
    offset = _offsets(motion, direction, room, time, draws)
    spare = room - np.ptp(offset, axis=1)
    start = (REACH * largest + _MARGIN)[:, None] + spare * draws[:, 6:8]
    path = offset - offset.min(1, keepdims=True) + start[:, None]

    turn = np.deg2rad(_between(135, 225, draws[:, 3])) * np.where(draws[:, 4] < 0.5, -1, 1)
    angle = np.where(_is(motion, "rotate"), turn, 0.0)[:, None] * time
    return path, radius, angle


def _offsets(
    motion: Ints,
    direction: Ints,
    room: npt.NDArray[np.float64],
    time: npt.NDArray[np.float64],
    draws: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Where the centre is relative to anywhere, (N, F, 2): within the room there is."""
    signs = np.zeros((len(motion), 2))
    for name, sign in (("left", (-1, 0)), ("right", (1, 0)), ("up", (0, -1)), ("down", (0, 1))):
        signs[_is(motion, name)] = sign
    diagonal = _is(motion, "diagonal")
    signs[diagonal] = np.array(DIAGONALS)[direction[diagonal]]
    shortest = room.min(1, keepdims=True)
    way = np.minimum(np.where(diagonal[:, None], shortest, room), 1.6 * shortest)
    straight = (signs * way * _between(0.7, 1, draws[:, 1:2]))[:, None] * time[:, None]

    height = room[:, 1] * _between(0.7, 1, draws[:, 1])
    hop = -height[:, None] * np.abs(np.sin(np.pi * (2 * time + draws[:, 2:3])))
    bounce = np.stack([np.zeros_like(hop), hop], -1)

    radius = 0.5 * shortest * _between(0.75, 1, draws[:, 1:2])
    phase = 2 * np.pi * (time * np.where(draws[:, 4:5] < 0.5, -1, 1) + draws[:, 2:3])
    circle = radius[..., None] * np.stack([np.cos(phase), np.sin(phase)], -1)

    kinds = [_is(motion, "bounce")[:, None, None], _is(motion, "circle")[:, None, None]]
    return np.select(kinds, [bounce, circle], straight)


def _growth(motion: Ints, time: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(N, F) from half to all of the radius, or the other way round."""
    return np.where(_is(motion, "shrink")[:, None], 1 - time / 2, 0.5 + time / 2)


def _sample_corners(
    rng: np.random.Generator,
    path: npt.NDArray[np.float64],
    radius: npt.NDArray[np.float64],
    width: int,
    height: int,
) -> tuple[Ints, npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """A companion's corner, radius and centre, and whether the main object leaves it room there.

    It also has to stay the clearly smaller one.
    """
    corner = rng.integers(len(CORNERS), size=len(path))
    companion_radius = min(width, height) / 64 * _between(*_COMPANION_RADII, rng.random(len(path)))
    inset = (REACH * companion_radius + _MARGIN)[:, None] + rng.random((len(path), 2)) * 3
    at_end = np.array(CORNERS)[corner] > 0
    centre = np.where(at_end, np.array([width, height]) - inset, inset)
    gap = np.linalg.norm(path - centre[:, None], axis=-1) - REACH * (radius + companion_radius[:, None])
    fits = (gap.min(1) >= _MARGIN) & (radius.min(1) >= 1.4 * companion_radius)
    return corner, companion_radius, centre, fits


def _is(motion: Ints, name: str) -> npt.NDArray[np.bool_]:
    return motion == MOTIONS.index(name)


def _between(
    low: float | npt.NDArray[np.float64], high: float | npt.NDArray[np.float64], part: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    return low + (high - low) * part
