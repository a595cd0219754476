"""Where a picture is cut when it is decoded in tiles, so that they join without seams.

A tile is decoded with a halo: all the pixels around its own that its own depend on. What convolutions make of
the zeros beyond a halo's edge stays in the halo, which is cut off. Where the picture ends, so does the tile,
and the zeros are those that the whole picture is padded with. All tiles have the same sides, so that what is
laid out for one serves all.

Lengths are in latent pixels unless they say otherwise. Plain arithmetic: nothing here knows of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Grid(NamedTuple):
    """How many tiles there are from top to bottom and from left to right."""

    rows: int
    columns: int


WHOLE = Grid(1, 1)


@dataclass(frozen=True)
class Span:
    """One side of a tile: what is decoded, and what of it is the tile's own."""

    start: int
    stop: int
    own_start: int
    own_stop: int

    @property
    def decoded(self) -> slice:
        return slice(self.start, self.stop)

    def kept(self, scale: int, *, length: int) -> tuple[slice, int]:
        """Which of the decoded pixels to keep, and where they begin in a picture of `length` latent pixels.

        scale: pixels for each latent one. Where another tile follows, the first pixel of it is kept as well,
        as VideoModel.decode promises.
        """
        shared = 1 if self.own_stop < length else 0
        first, end = ((own - self.start) * scale for own in (self.own_start, self.own_stop))
        return slice(first, end + shared), self.own_start * scale


@dataclass(frozen=True)
class Tile:
    rows: Span
    columns: Span


def halo_width(radii: Sequence[int], *, cell: int) -> int:
    """How far a tile's pixels, with the one that it shares with the next, reach beyond its own latents.

    radii: of all convolutions on a path from latents to pixels, added up for each size of the picture: the
    latents' own, twice that, four times and so on. cell: pixels to a side of what the last size's pixels
    become.
    """
    finest_first = list(reversed(radii))
    reach = _divided(1, cell) + finest_first[0]
    for radius in finest_first[1:]:
        reach = _divided(reach, 2) + radius
    return reach


def tile_length(length: int, *, count: int, halo: int) -> int:
    """Of a side that `count` tiles share: the first and the last have one halo, those between them two."""
    return _divided(length + 2 * halo * (count - 1), count)


def spans(length: int, *, count: int, halo: int) -> list[Span]:
    """One side's tiles in order. What is their own covers it, each place once."""
    side = tile_length(length, count=count, halo=halo)
    if count == 1:
        return [Span(0, length, 0, length)]
    starts = [index * (length - side) // (count - 1) for index in range(count)]
    cuts = [0, *(start + halo for start in starts[1:]), length]
    tiles = [Span(start, start + side, *own) for start, own in zip(starts, pairwise(cuts), strict=True)]
    assert all(tile.start <= tile.own_start < tile.own_stop <= tile.stop for tile in tiles), tiles
    return tiles


def tiles(height: int, width: int, *, grid: Grid, halo: int) -> list[Tile]:
    """Row by row."""
    columns = spans(width, count=grid.columns, halo=halo)
    return [Tile(row, column) for row in spans(height, count=grid.rows, halo=halo) for column in columns]


def cheapest_grid(height: int, width: int, *, halo: int, most_area: int) -> Grid:
    """Of the grids whose tiles are not larger than most_area the one that decodes least in all.

    Then the one of the fewest tiles. What is a tile's own is about as wide as its halo or wider: narrower,
    more than nine times the picture would be decoded. Where all such tiles are too large: the smallest ones.
    """

    def area(grid: Grid) -> int:
        return tile_length(height, count=grid.rows, halo=halo) * tile_length(
            width, count=grid.columns, halo=halo
        )

    grids = [
        Grid(rows, columns)
        for rows in range(1, max(1, height // halo) + 1)
        for columns in range(1, max(1, width // halo) + 1)
    ]
    smallest = min(map(area, grids))
    fitting = [grid for grid in grids if area(grid) <= max(most_area, smallest)]
    return min(
        fitting, key=lambda grid: (area(grid) * grid.rows * grid.columns, grid.rows * grid.columns, grid)
    )


def _divided(number: int, parts: int) -> int:
    return -(-number // parts)
