"""The judge reads ground truth right, also after the video's colour format."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from pipeline.frames import to_frames
from pipeline.models.tiny.render import render
from pipeline.models.tiny.scenes import SHAPES, sample_scenes
from pipeline.quality.i420 import to_rgb
from pipeline.quality.oracle import NOTHING, OUTLINES, read_clip


def shares_right(seed: int, width: int, height: int, num_scenes: int, num_frames: int = 17) -> np.ndarray:
    """Of colour, shape and motion, on clips that went through I420."""
    scenes = sample_scenes(np.random.default_rng(seed), num_scenes, width=width, height=height)
    right = []
    for index, video in enumerate(render(scenes).permute(0, 4, 1, 2, 3)):
        frames = to_frames(video, width=width, height=height, num_frames=num_frames)
        reading = read_clip(to_rgb(frames))
        said = (reading.colour, reading.shape, reading.motion)
        right.append([a == b for a, b in zip(said, scenes.truth(index), strict=True)])
    return np.mean(right, axis=0)


@pytest.mark.parametrize(("width", "height", "num_scenes"), [(64, 64, 200), (96, 64, 60), (64, 96, 60)])
def test_it_reads_nearly_every_scene_right(width: int, height: int, num_scenes: int) -> None:
    assert (shares_right(1, width, height, num_scenes) >= 0.98).all()


def test_it_reads_the_colour_and_shape_of_nine_frames() -> None:
    assert (shares_right(2, 64, 96, 40, num_frames=9)[:2] >= 0.98).all()


def test_it_knows_the_shapes_of_the_scenes() -> None:
    assert set(OUTLINES) == set(SHAPES)


def test_an_empty_clip_shows_nothing() -> None:
    assert read_clip(np.full((17, 64, 64, 3), 90, np.uint8)) == NOTHING


def test_noise_below_contrast_changes_nothing() -> None:
    rng = np.random.default_rng(3)
    scenes = sample_scenes(rng, 30, width=64, height=64)
    right = 0
    for index, video in enumerate(render(scenes).numpy() * 255):
        noisy = (video + rng.normal(0, 6, video.shape)).clip(0, 255).astype(np.uint8)
        reading = read_clip(noisy)
        right += (reading.colour, reading.shape, reading.motion) == scenes.truth(index)
    assert right >= 29


def test_a_clip_read_backwards_moves_backwards() -> None:
    scenes = sample_scenes(np.random.default_rng(4), 60, width=64, height=64)
    opposite = {"left": "right", "right": "left", "up": "down", "down": "up", "grow": "shrink"}
    opposite |= {"shrink": "grow"}
    for video in (render(scenes).numpy() * 255).astype(np.uint8):
        motion = read_clip(video).motion
        assert read_clip(video[::-1]).motion == opposite.get(str(motion), motion)


@pytest.mark.parametrize("colour", [(1.0, 0.0, 0.0), (0.1, 0.6, 0.3), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)])
def test_i420_comes_back_as_the_colour_it_was(colour: tuple[float, float, float]) -> None:
    rgb = torch.tensor(colour)[:, None, None, None].expand(3, 2, 6, 4)
    back = to_rgb(to_frames(rgb, width=4, height=6, num_frames=2))
    assert back.shape == (2, 6, 4, 3)
    assert np.abs(back - 255 * np.array(colour)).max() <= 2.5


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((5, 64, 64, 3)),
        np.zeros((5, 64, 64, 3), np.bool_),
        np.zeros((5, 64, 64), np.uint8),
        np.zeros((5, 64, 64, 4), np.uint8),
        np.zeros((5, 3, 64, 64), np.uint8),
        np.zeros((1, 64, 64, 3), np.uint8),
        np.zeros((0, 64, 64, 3), np.uint8),
        np.zeros((5, 0, 64, 3), np.uint8),
        np.zeros((5, 64, 15, 3), np.uint8),
    ],
    ids=lambda frames: f"{frames.dtype} {frames.shape}",
)
def test_what_is_no_clip_is_refused(frames: np.ndarray) -> None:
    with pytest.raises(ValueError, match=re.escape(str(frames.shape))):
        read_clip(frames)


def test_a_clip_without_an_object_shows_nothing() -> None:
    assert read_clip(np.full((2, 16, 16, 3), 90, np.uint8)) == NOTHING
