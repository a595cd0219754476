"""From the engine's planar I420 back to RGB, as a player shows it. numpy alone.

Shapes: F frames, H and W pixels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def to_rgb(frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(F, H * 3 // 2, W) I420, BT.709, limited range, to (F, H, W, 3). A chroma sample fills 2x2 pixels."""
    num_frames, rows, width = frames.shape
    height = rows * 2 // 3
    flat = frames.reshape(num_frames, -1).astype(np.float32)
    num_luma, num_chroma = height * width, height * width // 4
    luma = (flat[:, :num_luma].reshape(num_frames, height, width) - 16) / 219
    cb, cr = (
        ((plane.reshape(num_frames, height // 2, width // 2) - 128) / 224).repeat(2, 1).repeat(2, 2)
        for plane in np.split(flat[:, num_luma:], [num_chroma], axis=1)
    )
    red = luma + 1.5748 * cr
    blue = luma + 1.8556 * cb
    green = (luma - 0.2126 * red - 0.0722 * blue) / 0.7152
    return (np.stack([red, green, blue], -1).clip(0, 1) * 255).round().astype(np.uint8)
