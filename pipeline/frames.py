"""From decoded RGB to the bytes a video encoder takes: cropped, trimmed, planar I420.

Shapes: F frames, H and W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

# BT.709 luma weights, and what they leave of the colour differences.
_RED, _GREEN, _BLUE = 0.2126, 0.7152, 0.0722
_CB_RANGE = 2 * (1 - _BLUE)
_CR_RANGE = 2 * (1 - _RED)


@dataclass(frozen=True)
class _Copy:
    """On its way from the device. The source lives until it is done, so its memory is never in doubt."""

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
        self._size = (width, height)
        self._frames = np.empty((num_frames, height * 3 // 2, width), np.uint8)
        self._num_taken = 0
        self._copying = torch.cuda.Stream(device) if device != "cpu" else None
        self._waiting: _Copy | None = None

    def add(self, rgb_3FHW: torch.Tensor) -> None:
        """RGB in [0, 1], at least as large as asked for; pieces in order."""
        room = len(self._frames) - self._num_taken
        if room == 0:
            return
        i420 = to_i420(_cropped(rgb_3FHW[:, :room], *self._size))
        if self._copying is None:
            self._take(i420)
            return
        earlier, self._waiting = self._waiting, self._copied(i420, self._copying)
        self._wait_for(earlier)

    def frames(self) -> npt.NDArray[np.uint8]:
        """uint8 (num_frames, height * 3 // 2, width), once all pieces were added."""
        self._wait_for(self._waiting)
        self._waiting = None
        assert self._num_taken == len(self._frames), (self._num_taken, len(self._frames))
        return self._frames

    def _copied(self, i420: torch.Tensor, stream: torch.cuda.Stream) -> _Copy:
        stream.wait_stream(torch.cuda.current_stream(i420.device))
        with torch.cuda.stream(stream):
            pinned = torch.empty(i420.shape, dtype=torch.uint8, pin_memory=True)
            pinned.copy_(i420, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return _Copy(source=i420, pinned=pinned, done=done)

    def _wait_for(self, copy: _Copy | None) -> None:
        if copy is not None:
            copy.done.synchronize()
            self._take(copy.pinned)

    def _take(self, i420: torch.Tensor) -> None:
        end = self._num_taken + len(i420)
        self._frames[self._num_taken : end] = i420.numpy()
        self._num_taken = end


def to_frames(rgb_3FHW: torch.Tensor, *, width: int, height: int, num_frames: int) -> npt.NDArray[np.uint8]:
    """RGB in [0, 1], at least as large as asked for, as (num_frames, height * 3 // 2, width) I420.

    The middle of the picture and the first frames are kept. width, height: even.
    """
    collector = FrameCollector(width=width, height=height, num_frames=num_frames, device=str(rgb_3FHW.device))
    collector.add(rgb_3FHW)
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
    planes = [plane.flatten(1) for plane in (16 + 219 * luma_FHW, 128 + 224 * cb, 128 + 224 * cr)]
    num_frames, height, width = luma_FHW.shape
    return torch.cat(planes, dim=1).round().to(torch.uint8).view(num_frames, height * 3 // 2, width)


def _cropped(rgb_3FHW: torch.Tensor, width: int, height: int) -> torch.Tensor:
    top = (rgb_3FHW.shape[2] - height) // 2
    left = (rgb_3FHW.shape[3] - width) // 2
    assert top >= 0, (rgb_3FHW.shape, height)
    assert left >= 0, (rgb_3FHW.shape, width)
    return rgb_3FHW[:, :, top : top + height, left : left + width]
