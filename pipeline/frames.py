"""From decoded RGB to the bytes a video encoder takes: cropped, trimmed, planar I420.

Shapes: F frames, H and W pixels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

# BT.709 luma weights, and what they leave of the colour differences.
_RED, _GREEN, _BLUE = 0.2126, 0.7152, 0.0722
_CB_RANGE = 2 * (1 - _BLUE)
_CR_RANGE = 2 * (1 - _RED)


def to_frames(rgb_3FHW: torch.Tensor, *, width: int, height: int, num_frames: int) -> npt.NDArray[np.uint8]:
    """RGB in [0, 1], at least as large as asked for, as (num_frames, height * 3 // 2, width) I420.

    The middle of the picture and the first frames are kept. width, height: even.
    """
    return to_i420(_cropped(rgb_3FHW, width, height)[:, :num_frames]).cpu().numpy()


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
