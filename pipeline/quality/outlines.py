"""The ideal shapes that the oracle knows, as outlines, and pictures of them. numpy alone.

Outlines are polygons (V, 2) of x, y with y downwards, of any scale; a ring is a pair, the inner one cut out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Outline = tuple[Floats, ...]

_SUBSAMPLES = 4


def _around(radii: list[float], first_angle: float = -np.pi / 2) -> Floats:
    """Corners at equal angles around the centre, the first one at the top."""
    angles = first_angle + 2 * np.pi * np.arange(len(radii)) / len(radii)
    return np.array(radii)[:, None] * np.stack([np.cos(angles), np.sin(angles)], -1)


def _disc(radius: float) -> Floats:
    return _around([radius] * 48)


def _plus(arm: float) -> Floats:
    """Arms of length 1 and half width `arm`."""
    quarter = np.array([(arm, -arm), (1, -arm), (1, arm)])
    turns = [np.array([[0, -1], [1, 0]])]
    for _ in range(3):
        turns.append(turns[0] @ turns[-1])
    return np.concatenate([quarter @ turn.T for turn in turns])


def _two_lobes() -> Floats:
    """A heart: a square on its corner, with half discs on its upper sides."""
    angle = np.linspace(np.pi, 0, 17)
    half_side = 2**0.5 / 4
    outward = np.array([1, -1]) / 2**0.5
    along = np.array([1, 1]) / 2**0.5
    middle = np.array([0.25, -0.25])
    lobe = middle + half_side * (np.cos(angle)[:, None] * along + np.sin(angle)[:, None] * outward)
    right = np.concatenate([lobe, [(0.0, 0.5)]])
    left = right[-2::-1] * (-1, 1)
    return np.concatenate([right, left])


OUTLINES: dict[str, Outline] = {
    "circle": (_disc(1),),
    "square": (_around([1, 1, 1, 1], -np.pi / 4),),
    "triangle": (_around([1, 1, 1]),),
    "star": (_around([1, 0.46] * 5),),
    "cross": (_plus(0.31),),
    "ring": (_disc(1), _disc(0.54)),
    "heart": (_two_lobes(),),
}


def cover(outline: Outline, angle: float, grid: Floats) -> Floats:
    """How much of each cell the turned outline covers, centred, scaled to the area of a unit disc: (G, G).

    angle: radians, clockwise. grid: the cells' middles along both axes, evenly spaced, (G,).
    """
    cell = grid[1] - grid[0]
    inside_cell = ((np.arange(_SUBSAMPLES) + 0.5) / _SUBSAMPLES - 0.5) * cell
    fine = (grid[:, None] + inside_cell).reshape(-1)
    cos, sin = np.cos(angle), np.sin(angle)
    centre, area = _centroid(outline)
    scale = np.sqrt(np.pi / area)
    polygons = [scale * (polygon - centre) @ np.array([[cos, sin], [-sin, cos]]) for polygon in outline]
    inside = np.logical_xor.reduce([_inside(polygon, fine) for polygon in polygons])
    shape = (len(grid), _SUBSAMPLES, len(grid), _SUBSAMPLES)
    return inside.reshape(shape).mean((1, 3))


def _centroid(outline: Outline) -> tuple[Floats, float]:
    """Centre and area by the shoelace formula; the second polygon is a hole."""
    moment, area = np.zeros(2), 0.0
    for polygon, sign in zip(outline, (1, -1), strict=False):
        following = np.roll(polygon, -1, axis=0)
        cross = polygon[:, 0] * following[:, 1] - following[:, 0] * polygon[:, 1]
        turn = np.sign(cross.sum()) * sign
        area += turn * cross.sum() / 2
        moment += turn * ((polygon + following) * cross[:, None]).sum(0) / 6
    return moment / area, float(area)


def _inside(polygon: Floats, grid: Floats) -> npt.NDArray[np.bool_]:
    """Even-odd rule for every point of a square grid, [y, x]."""
    x, y = grid[None, :, None], grid[:, None, None]
    (x0, y0), (x1, y1) = polygon.T, np.roll(polygon, -1, axis=0).T
    spans = (y0 <= y) != (y1 <= y)
    slope = np.where(y1 == y0, 0.0, (x1 - x0) / np.where(y1 == y0, 1.0, y1 - y0))
    return ((spans & (x < x0 + (y - y0) * slope)).sum(-1) % 2).astype(bool)
