"""Small clips, for the tests of storage."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.video import ClipMetadata, EncodedClip, VideoSettings, encode_clip

METADATA = ClipMetadata(id="a", fingerprint="f" * 64, seed=2**63 - 1, model="tiny")


def video_settings(**changes: Any) -> VideoSettings:
    values = {"width": 64, "height": 64, "num_frames": 5, "fps": Fraction(24), "encoder_preset": "ultrafast"}
    return VideoSettings(**{**values, **changes})


def noise(settings: VideoSettings) -> npt.NDArray[np.uint8]:
    """Frames that compress badly, so that every one of them has bytes of its own."""
    shape = (settings.num_frames, settings.height * 3 // 2, settings.width)
    return np.random.default_rng(0).integers(16, 236, shape, dtype=np.uint8)


def write_clip(path: Path, *, metadata: ClipMetadata = METADATA, **changes: Any) -> EncodedClip:
    settings = video_settings(**changes)
    return encode_clip(noise(settings), settings=settings, metadata=metadata, partial=path)
