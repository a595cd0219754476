"""From decoded RGB to the bytes a video encoder takes: cropped, trimmed, planar I420.

Shapes: F frames, H and W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pipeline.models.protocol import Piece

# BT.709 luma weights, and what they leave of the colour differences.
_RED, _GREEN, _BLUE = 0.2126, 0.7152, 0.0722
_CB_RANGE = 2 * (1 - _BLUE)
_CR_RANGE = 2 * (1 - _RED)


class _Place(NamedTuple):
    """Where something begins in the clip that is kept. top, left: even."""

    first_frame: int
    top: int
    left: int


@dataclass(frozen=True)
class _Copy:
    """On its way from the device. The source lives until it is done, so its memory is never in doubt."""

    place: _Place
    source: torch.Tensor
    pinned: torch.Tensor
    done: torch.cuda.Event


class FrameCollector:
    """Takes a clip's RGB piece by piece and gives its I420 frames, copied while the device decodes on.

    Each piece goes through pinned memory on a stream of its own; it is taken from there when the next one
    comes, so that the device always has work before anything waits for it. width, height: even; the middle
    of the picture and the first num_frames frames are kept, the rest is dropped.
    """

    def __init__(self, *, width: int, height: int, num_frames: int, device: str) -> None:
        self._frames = np.empty((num_frames, height * 3 // 2, width), np.uint8)
        self._planes = planes(self._frames)
        self._num_missing = num_frames * height * width
        self._copying = torch.cuda.Stream(device) if device != "cpu" else None
        self._waiting: _Copy | None = None

    def add(self, piece: Piece) -> None:
        """Of pictures at least as large as asked for; pieces in any order."""
        rgb_3FHW, place = self._kept(piece)
        if rgb_3FHW.numel() == 0:
            return
        i420 = to_i420(rgb_3FHW)
        if self._copying is None:
            self._take(i420, place)
            return
        earlier, self._waiting = self._waiting, self._copied(i420, place, self._copying)
        self._wait_for(earlier)

    def frames(self) -> npt.NDArray[np.uint8]:
        """uint8 (num_frames, height * 3 // 2, width), once all pieces were added."""
        self._wait_for(self._waiting)
        self._waiting = None
        assert self._num_missing == 0, self._num_missing
        return self._frames

    def _kept(self, piece: Piece) -> tuple[torch.Tensor, _Place]:
        """What is kept of it: a view."""
        luma_FHW, *_ = self._planes
        num_frames, height, width = luma_FHW.shape
        _, _, piece_height, piece_width = piece.rgb_3FHW.shape
        rows, top = _whole_pairs(piece.top - _margin(piece.height, height), piece_height, within=height)
        columns, left = _whole_pairs(piece.left - _margin(piece.width, width), piece_width, within=width)
        room = max(0, num_frames - piece.first_frame)
        return piece.rgb_3FHW[:, :room, rows, columns], _Place(piece.first_frame, top, left)

    def _copied(self, i420: torch.Tensor, place: _Place, stream: torch.cuda.Stream) -> _Copy:
        stream.wait_stream(torch.cuda.current_stream(i420.device))
        with torch.cuda.stream(stream):
            pinned = torch.empty(i420.shape, dtype=torch.uint8, pin_memory=True)
            pinned.copy_(i420, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return _Copy(place=place, source=i420, pinned=pinned, done=done)

    def _wait_for(self, copy: _Copy | None) -> None:
        if copy is not None:
            copy.done.synchronize()
            self._take(copy.pinned, copy.place)

    def _take(self, i420: torch.Tensor, place: _Place) -> None:
        first, top, left = place
        luma_FHW, *chroma = planes(i420.numpy())
        num_frames, height, width = luma_FHW.shape
        for ours, theirs, part in zip(self._planes, (luma_FHW, *chroma), (1, 2, 2), strict=True):
            rows = slice(top // part, (top + height) // part)
            columns = slice(left // part, (left + width) // part)
            ours[first : first + num_frames, rows, columns] = theirs
        self._num_missing -= luma_FHW.size


def to_frames(rgb_3FHW: torch.Tensor, *, width: int, height: int, num_frames: int) -> npt.NDArray[np.uint8]:
    """RGB in [0, 1], at least as large as asked for, as (num_frames, height * 3 // 2, width) I420.

    The middle of the picture and the first frames are kept. width, height: even.
    """
    collector = FrameCollector(width=width, height=height, num_frames=num_frames, device=str(rgb_3FHW.device))
    collector.add(Piece.of_whole(rgb_3FHW))
    return collector.frames()


def to_i420(rgb_3FHW: torch.Tensor) -> torch.Tensor:
    """uint8 (F, H * 3 // 2, W): all luma rows, then the Cb and the Cr plane. BT.709, limited range.

    A chroma sample is the mean of its 2x2 pixels, so it sits in their centre; players of H.264 assume the
    left pair, half a luma pixel away, unless told, which no eye can see. rgb_3FHW: in [0, 1], even sides.
    """
    red_FHW, green_FHW, blue_FHW = rgb_3FHW.float()
    luma_FHW = _RED * red_FHW + _GREEN * green_FHW + _BLUE * blue_FHW
    cb = F.avg_pool2d((blue_FHW - luma_FHW) / _CB_RANGE, 2)
    cr = F.avg_pool2d((red_FHW - luma_FHW) / _CR_RANGE, 2)
    # Flat planes: with a height of 4k + 2 a chroma plane ends in the middle of a row of the result.
    flat = [plane.flatten(1) for plane in (16 + 219 * luma_FHW, 128 + 224 * cb, 128 + 224 * cr)]
    num_frames, height, width = luma_FHW.shape
    return torch.cat(flat, dim=1).round().to(torch.uint8).view(num_frames, height * 3 // 2, width)


def planes(i420: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], ...]:
    """Luma (F, H, W), then Cb and Cr of half its sides: views of (F, H * 3 // 2, W), which is contiguous."""
    num_frames, rows, width = i420.shape
    height = rows * 2 // 3
    flat = i420.reshape(num_frames, rows * width)
    luma, cb, cr = np.split(flat, [height * width, height * width * 5 // 4], axis=1)
    half = (num_frames, height // 2, width // 2)
    return luma.reshape(num_frames, height, width), cb.reshape(half), cr.reshape(half)


def _margin(rendered: int, kept: int) -> int:
    """What is cut off before the middle of a side; it may be odd."""
    assert rendered >= kept, (rendered, kept)
    return (rendered - kept) // 2


def _whole_pairs(start: int, length: int, *, within: int) -> tuple[slice, int]:
    """A side's pixels that are kept, in whole pairs of one chroma sample; where they begin in the picture.

    start: of the side, in the kept picture, where pairs begin at even places. within: that picture's length.
    """
    first, end = max(0, start + start % 2), min(within, start + length)
    end = max(first, end - end % 2)
    return slice(first - start, end - start), first
