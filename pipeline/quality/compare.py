"""How one clip differs from another of the same prompt and noise: what a person would see, in numbers.

Clips are the engine's own frames, before any encoder: uint8 planar I420, (F, H * 3 // 2, W), BT.709, limited
range. numpy alone.

Shapes: F frames, H and W pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Frames = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

_PEAK = 255.0
# SSIM's window and constants, as its authors chose them.
_WINDOW_SIDE, _WINDOW_SIGMA = 11, 1.5
_C1, _C2 = (0.01 * _PEAK) ** 2, (0.03 * _PEAK) ** 2
# As ffmpeg's `blackdetect`: 98 % of a frame below a tenth of the way from black (16) to white (235).
_BLACK_LUMA, _BLACK_FRAC = 16 + 0.1 * 219, 0.98
_DARK_FRAC = 0.9  # of a reference that is so dark that a little more makes it black


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of a candidate's clip from the reference's.

    psnr_db: infinite for equal clips. psnr_db, ssim: None where the clips differ in size or frames,
    ssim also of clips that are smaller than its window.
    flicker_ratio: None where the reference stands still. num_black, num_frozen: frames of the candidate that
    are black, or the same as the one before, where the reference's are not. num_frames: the candidate's.
    """

    psnr_db: float | None
    ssim: float | None
    flicker_ratio: float | None
    num_black: int
    num_frozen: int
    num_frames: int

    @property
    def is_black(self) -> bool:
        """A customer sees a single black frame."""
        return self.num_black > 0

    @property
    def is_frozen(self) -> bool:
        """Most of the clip stands still; a frame that is shown twice alone is a stutter, not a freeze."""
        return 2 * self.num_frozen > self.num_frames - 1


def compare(reference: Frames, candidate: Frames) -> Difference:
    """Raises ValueError for frames that are not I420."""
    for frames in (reference, candidate):
        _require_i420(frames)
    is_same_shape = reference.shape == candidate.shape
    fits_window = is_same_shape and min(luma(reference).shape[1:]) >= _WINDOW_SIDE
    reference_flicker = flicker(reference)
    return Difference(
        psnr_db=psnr_db(reference, candidate) if is_same_shape else None,
        ssim=ssim(reference, candidate) if fits_window else None,
        flicker_ratio=flicker(candidate) / reference_flicker if reference_flicker else None,
        num_black=_num_only_in(black_frames(candidate), black_frames(reference, dark_frac=_DARK_FRAC)),
        num_frozen=_num_only_in(repeated_frames(candidate), repeated_frames(reference)),
        num_frames=len(candidate),
    )


def psnr_db(reference: Frames, candidate: Frames) -> float:
    """Peak signal-to-noise ratio in dB, against a peak of 255; infinite for equal clips.

    Over all samples of luma and chroma of the whole clip: one mean squared error, not a mean of decibels.
    """
    squared = sum(
        float(np.square(ours.astype(np.int32) - theirs).sum(dtype=np.int64))
        for ours, theirs in zip(candidate, reference, strict=True)
    )
    return 10 * math.log10(_PEAK**2 * reference.size / squared) if squared else math.inf


def ssim(reference: Frames, candidate: Frames) -> float:
    """Mean structural similarity of luma over all frames, 1 for equal clips.

    Z. Wang, A. C. Bovik, H. R. Sheikh, E. P. Simoncelli: Image quality assessment: from error visibility to
    structural similarity, IEEE Transactions on Image Processing 13 (2004): an 11x11 Gaussian window of
    standard deviation 1.5 where it fits whole, K1 = 0.01, K2 = 0.03, L = 255. Their advice to shrink large
    pictures first, as if seen from afar, is left out. At least 11x11 pixels.
    """
    luma_FHW = luma(reference)
    assert min(luma_FHW.shape[1:]) >= _WINDOW_SIDE, luma_FHW.shape
    return float(np.mean([_ssim_HW(x, y) for x, y in zip(luma_FHW, luma(candidate), strict=True)]))


def flicker(frames: Frames) -> float:
    """Mean absolute difference of luma from frame to frame, in its 8-bit levels; 0 for a single frame."""
    changes = [
        float(np.abs(after.astype(np.int16) - before).mean()) for before, after in pairwise(luma(frames))
    ]
    return float(np.mean(changes)) if changes else 0.0


def black_frames(frames: Frames, *, dark_frac: float = _BLACK_FRAC) -> Flags:
    """(F,) of frames that a viewer takes for black. dark_frac: the least share of dark pixels."""
    return (luma(frames) < _BLACK_LUMA).mean(axis=(1, 2)) >= dark_frac


def repeated_frames(frames: Frames) -> Flags:
    """(F - 1,) of frames that equal the one before, to the last bit."""
    return np.array([np.array_equal(*pair) for pair in pairwise(frames)], dtype=np.bool_)


def luma(frames: Frames) -> Frames:
    """(F, H, W) of I420 frames."""
    return frames[:, : frames.shape[1] * 2 // 3]


def _require_i420(frames: Frames) -> None:
    if frames.dtype != np.uint8 or frames.ndim != 3 or not len(frames) or frames.shape[1] % 3:
        raise ValueError(f"frames are uint8 (F, H * 3 // 2, W), not {frames.dtype} {frames.shape}")


def _num_only_in(candidate: Flags, reference: Flags) -> int:
    """Flags of the candidate that the reference lacks at the same place; a reference with other places
    has all or none of them, as all of its own are set or not."""
    if len(candidate) != len(reference):
        reference = np.full(len(candidate), bool(len(reference)) and bool(reference.all()))
    return int((candidate & ~reference).sum())


def _ssim_HW(reference: Frames, candidate: Frames) -> float:
    x, y = reference.astype(np.float32), candidate.astype(np.float32)
    # From their own level: fp32 would lose the variance of a bright, flat picture in its squares.
    level = x.mean()
    x_shifted, y_shifted = x - level, y - level
    mean_x, mean_y = _blurred(x_shifted), _blurred(y_shifted)
    variance_x = _blurred(x_shifted * x_shifted) - mean_x * mean_x
    variance_y = _blurred(y_shifted * y_shifted) - mean_y * mean_y
    covariance = _blurred(x_shifted * y_shifted) - mean_x * mean_y
    mean_x, mean_y = mean_x + level, mean_y + level
    likeness = (2 * mean_x * mean_y + _C1) * (2 * covariance + _C2)
    bound = (mean_x * mean_x + mean_y * mean_y + _C1) * (variance_x + variance_y + _C2)
    return float((likeness / bound).mean(dtype=np.float64))


def _blurred(picture: Floats) -> Floats:
    """Under the Gaussian window, where it fits whole: (H - 10, W - 10)."""
    height, width = (side - _WINDOW_SIDE + 1 for side in picture.shape)
    rows = np.zeros((height, picture.shape[1]), np.float32)
    for offset, weight in enumerate(_WINDOW):
        rows += weight * picture[offset : offset + height]
    blurred = np.zeros((height, width), np.float32)
    for offset, weight in enumerate(_WINDOW):
        blurred += weight * rows[:, offset : offset + width]
    return blurred


def _gaussian() -> Floats:
    offsets = np.arange(_WINDOW_SIDE) - _WINDOW_SIDE // 2
    weights = np.exp(-(offsets**2) / (2 * _WINDOW_SIGMA**2))
    return (weights / weights.sum()).astype(np.float32)


_WINDOW = _gaussian()
