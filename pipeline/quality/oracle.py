"""Says what a clip shows: colour, shape and motion of its main object. Classical image processing, no model.

The judge of the built-in model: its clips have one main object before a plain or linearly graded background.
Everything here is deterministic and numpy alone.

Shapes: F frames, H and W pixels, G = GRID sides of an object's own picture, K templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from pipeline.quality.colours import COLOUR_RGB
from pipeline.quality.outlines import OUTLINES, cover

GRID = 24
_GRID_REACH = 2.0  # of the grid, in radii of a disc of the object's area: a star's tips reach 1.9
_ANGLES = np.deg2rad(np.arange(0, 360, 15))

_FOREGROUND = 55.0  # distance in RGB from the background; objects differ by more than 100
_LEAST_SIDE = 16
_LEAST_AREA = 12.0  # pixels; anything smaller is a blemish

# Motion, in units of the object's radius or the picture's shorter side; between what scenes do and do not.
_GROWS = np.log(1.6)  # in area; scenes double the radius
_MOVES = 0.09  # of the shorter side
_TURNS = 0.14  # mean change of the object's own picture; a still one changes by less than 0.06
_STRAIGHT = 0.75  # of net way to whole way
_FLAT = 0.35  # of the smaller extent to the larger

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the clip shows. All are None where there is no object in most of its frames."""

    colour: str | None
    shape: str | None
    motion: str | None


NOTHING = Reading(colour=None, shape=None, motion=None)


def read_clip(rgb_FHW3: npt.NDArray[np.uint8]) -> Reading:
    """rgb_FHW3: uint8 frames of one shot, at least 2 of at least 16x16 pixels. Raises ValueError.

    It knows clips of one main object before a smooth background: of noise it says what it resembles most.
    """
    if rgb_FHW3.dtype != np.uint8 or rgb_FHW3.ndim != 4 or rgb_FHW3.shape[-1] != 3:
        raise ValueError(f"frames are uint8 (F, H, W, 3), not {rgb_FHW3.dtype} {rgb_FHW3.shape}")
    if len(rgb_FHW3) < 2 or min(rgb_FHW3.shape[1:3]) < _LEAST_SIDE:
        raise ValueError(f"at least 2 frames of at least 16x16 pixels, not {rgb_FHW3.shape}")
    video = rgb_FHW3.astype(np.float64)
    away = video - _background(video)
    mask = _largest_components(np.linalg.norm(away, axis=-1) > _FOREGROUND)
    seen = mask.sum((1, 2)) >= _LEAST_AREA
    if seen.sum() < max(2, len(video) / 2):
        return NOTHING
    video, away, mask = video[seen], away[seen], mask[seen]
    alpha = _cover(away, mask)
    centre, area = _moments(alpha)
    pictures = _own_pictures(alpha, centre, area)
    return Reading(
        colour=_colour(video, away, mask),
        shape=_shape(pictures),
        motion=_motion(centre, area, pictures, min(video.shape[1:3])),
    )


def _background(video: Floats) -> Floats:
    """A plane through each channel, fitted to the border, then to all that is near it: (H, W, 3)."""
    _, height, width, _ = video.shape
    y, x = np.mgrid[0:height, 0:width]
    basis = np.stack([np.ones_like(x), x / width, y / height], -1).reshape(-1, 3).astype(np.float64)
    typical = np.median(video, axis=0).reshape(-1, 3)
    border = ((x < 3) | (x >= width - 3) | (y < 3) | (y >= height - 3)).reshape(-1)
    used = border
    for limit in (90.0, 60.0, 30.0, 30.0):
        plane = basis @ np.linalg.lstsq(basis[used], typical[used], rcond=None)[0]
        near = np.linalg.norm(typical - plane, axis=-1) < limit
        if near.sum() < 0.2 * len(near):  # not a plane at all: keep the last one that was
            break
        used = near
    return plane.reshape(height, width, 3)


def _largest_components(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Each frame's largest 4-connected region: labels spread until nothing changes."""
    numbers = np.arange(1, mask[0].size + 1, dtype=np.int32).reshape(mask[0].shape)
    labels = np.where(mask, numbers, np.int32(0))
    changed = True
    while changed:
        before = labels
        for axis in (1, 2):
            for forward in (True, False):
                labels = _swept(labels, axis, forward)
        changed = bool((labels != before).any())
    return np.stack([_most_frequent(frame) for frame in labels])


def _swept(labels: npt.NDArray[np.int32], axis: int, forward: bool) -> npt.NDArray[np.int32]:
    """Every pixel takes the largest label that lies before it in its own unbroken run along an axis."""
    lines = np.moveaxis(labels, axis, -1)
    lines = lines if forward else lines[..., ::-1]
    # A run's number in the upper digits makes a running maximum start anew at every gap.
    run = np.cumsum(lines == 0, axis=-1, dtype=np.int32) * (labels.max() + 1)
    spread = np.maximum.accumulate(lines + run, axis=-1) - run
    spread = np.where(lines > 0, spread, 0)
    return np.moveaxis(spread if forward else spread[..., ::-1], -1, axis)


def _most_frequent(labels: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    counts = np.bincount(labels.ravel())
    counts[0] = 0
    return (labels == counts.argmax()) & (labels > 0)


def _colour(video: Floats, away: Floats, mask: npt.NDArray[np.bool_]) -> str:
    """The name nearest to what is furthest from the background, so not a blend at the edge."""
    contrast = np.linalg.norm(away[mask], axis=-1)
    typical = np.median(video[mask][contrast >= np.quantile(contrast, 0.5)], axis=0)
    names = list(COLOUR_RGB)
    distances = np.linalg.norm(np.array([COLOUR_RGB[name] for name in names]) - typical, axis=-1)
    return names[int(distances.argmin())]


def _cover(away: Floats, mask: npt.NDArray[np.bool_]) -> Floats:
    """How much of each pixel the object covers, by how far it is from background to full contrast."""
    contrast = np.linalg.norm(away, axis=-1)
    full = np.quantile(contrast[mask], 0.7)
    return np.clip(contrast / full, 0, 1) * _dilated(mask)


def _dilated(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    wide = mask.copy()
    wide[:, 1:] |= mask[:, :-1]
    wide[:, :-1] |= mask[:, 1:]
    tall = wide.copy()
    tall[:, :, 1:] |= wide[:, :, :-1]
    tall[:, :, :-1] |= wide[:, :, 1:]
    return tall


def _moments(alpha: Floats) -> tuple[Floats, Floats]:
    """Centre (F, 2) as x, y and area (F,)."""
    area = alpha.sum((1, 2))
    y, x = np.mgrid[0 : alpha.shape[1], 0 : alpha.shape[2]]
    centre = np.stack([(alpha * x).sum((1, 2)), (alpha * y).sum((1, 2))], -1) / area[:, None]
    return centre, area


def _own_pictures(alpha: Floats, centre: Floats, area: Floats) -> Floats:
    """Each frame's object, centred and scaled to unit area, (F, G, G): what is left is shape and angle."""
    grid = _grid()  # G, in radii
    radius = np.sqrt(area / np.pi)[:, None]
    return _sampled(alpha, centre[:, :1] + radius * grid, centre[:, 1:] + radius * grid)


def _grid() -> Floats:
    return (np.arange(GRID) + 0.5) / GRID * 2 * _GRID_REACH - _GRID_REACH


def _sampled(pictures: Floats, x: Floats, y: Floats) -> Floats:
    """Bilinear samples of (F, H, W) at x and y (F, G), zero outside."""
    padded = np.pad(pictures, ((0, 0), (1, 1), (1, 1)))
    _, height, width = padded.shape
    x, y = np.clip(x + 1, 0, width - 1.001), np.clip(y + 1, 0, height - 1.001)
    left, top = x.astype(int), y.astype(int)
    right_part, lower_part = (x - left)[:, None, :], (y - top)[:, :, None]
    frame = np.arange(len(padded))[:, None, None]
    rows, columns = top[:, :, None], left[:, None, :]
    upper = padded[frame, rows, columns] * (1 - right_part) + padded[frame, rows, columns + 1] * right_part
    lower = (
        padded[frame, rows + 1, columns] * (1 - right_part)
        + padded[frame, rows + 1, columns + 1] * right_part
    )
    return upper * (1 - lower_part) + lower * lower_part


def _shape(pictures: Floats) -> str:
    """The outline that fits best at any angle, over all frames."""
    seen = pictures.reshape(len(pictures), -1)
    names, templates = _templates()
    errors = (templates**2).sum(
        1
    ) - 2 * seen @ templates.T  # F, shapes * angles; the squares' common part left out
    best = errors.reshape(len(seen), len(names), -1).min(-1)
    return names[int(best.mean(0).argmin())]


@cache
def _templates() -> tuple[tuple[str, ...], Floats]:
    """The outlines at every angle, centred and scaled as the objects are: (shapes * angles, G * G)."""
    pictures = [
        cover(outline, angle, _grid()).reshape(-1) for outline in OUTLINES.values() for angle in _ANGLES
    ]
    return tuple(OUTLINES), np.stack(pictures)


def _motion(centre: Floats, area: Floats, pictures: Floats, shorter_side: int) -> str:
    extent = np.ptp(centre, axis=0)
    if extent.max() < _MOVES * shorter_side:
        return _motion_in_place(area, pictures)
    way = np.diff(centre, axis=0)
    net = centre[-1] - centre[0]
    if np.linalg.norm(net) >= _STRAIGHT * np.linalg.norm(way, axis=-1).sum():
        return _direction(net)
    return "bounce" if extent.min() < _FLAT * extent.max() else "circle"


def _motion_in_place(area: Floats, pictures: Floats) -> str:
    num_ends = max(1, len(area) // 6)
    growth = np.log(area[-num_ends:].mean() / area[:num_ends].mean())
    if abs(growth) > _GROWS:
        return "grow" if growth > 0 else "shrink"
    change = np.abs(pictures - pictures[0]).sum((1, 2)) / pictures[0].sum()
    return "rotate" if np.quantile(change, 0.8) > _TURNS else "still"


def _direction(net: Floats) -> str:
    x, y = net
    if abs(x) > 2 * abs(y):
        return "right" if x > 0 else "left"
    if abs(y) > 2 * abs(x):
        return "down" if y > 0 else "up"
    return "diagonal"
