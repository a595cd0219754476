"""A video that costs an encoder what natural ones do.

A decoder with random weights gives noise, which libx264 needs many times as long for as for a film.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pipeline.frames import to_i420

_SEED = 3
# How steeply amplitudes fall with frequency: 1 is a sharp photograph's (Field 1987), video is softer. With
# 1.5 libx264 (crf 18, medium) makes 5.9 Mbit/s of 1344x768 at 24 fps, as of a film; with 1 it makes 46.
_SOFTNESS = 1.5
_FAR_SPEED, _NEAR_SPEED = (1, 0), (4, 1)  # pixels a frame, across and down
_GRAIN = 1.0  # standard deviation, of 255


def make_footage(*, width: int, height: int, num_frames: int) -> npt.NDArray[np.uint8]:
    """RGB (num_frames, height, width, 3), the same at every call: textures that drift past each other."""
    random = np.random.default_rng(_SEED)
    far, near = (_texture(random, width, height) for _ in range(2))
    cover = np.clip(0.5 + 4 * (_plane(random, width, height) - 0.1), 0, 1)[..., None].astype(np.float32)
    grain = random.normal(0, _GRAIN, (height, width, 1)).astype(np.float32)
    frames = np.empty((num_frames, height, width, 3), np.uint8)
    for number in range(num_frames):
        shown = _moved(cover, number, _NEAR_SPEED)
        picture = (1 - shown) * _moved(far, number, _FAR_SPEED) + shown * _moved(near, number, _NEAR_SPEED)
        picture += np.roll(grain, tuple(random.integers(0, (height, width))), axis=(0, 1))
        frames[number] = np.clip(picture, 0, 255).round()
    return frames


def as_i420(rgb_FHW3: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """What the engine gives back of such a video: (F, height * 3 // 2, width)."""
    frames_F3HW = (torch.from_numpy(frame).permute(2, 0, 1) / 255 for frame in rgb_FHW3)
    return np.concatenate([to_i420(frame_3HW.unsqueeze(1)).numpy() for frame_3HW in frames_F3HW])


def _texture(random: np.random.Generator, width: int, height: int) -> npt.NDArray[np.float32]:
    """Levels of 0 to 255: one plane of light, and weaker ones of colour."""
    light = _plane(random, width, height)
    colours = [light + 0.3 * _plane(random, width, height) for _ in range(3)]
    return (128 + 40 * np.stack(colours, axis=-1)).astype(np.float32)


def _plane(random: np.random.Generator, width: int, height: int) -> npt.NDArray[np.float64]:
    """Mean 0, standard deviation 1; its right edge goes on at its left, its bottom at its top."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = np.inf
    spectrum = np.fft.rfft2(random.normal(size=(height, width))) / frequency**_SOFTNESS
    plane = np.fft.irfft2(spectrum, s=(height, width))
    return plane / plane.std()


def _moved(plane: npt.NDArray[np.float32], frame: int, speed: tuple[int, int]) -> npt.NDArray[np.float32]:
    across, down = speed
    return np.roll(plane, (frame * down, frame * across), axis=(0, 1))
