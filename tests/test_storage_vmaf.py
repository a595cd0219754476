"""VMAF by the bundled ffmpeg: a clip against itself, against a worse one, and what cannot be had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import storage.vmaf
from manifests.errors import VideoError
from storage.ffmpeg import Finished
from storage.vmaf import has_vmaf, vmaf

WIDTH, HEIGHT, NUM_FRAMES = 640, 480, 3


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Moving bars."""
    frames = np.full((NUM_FRAMES, HEIGHT * 3 // 2, WIDTH), 128, np.uint8)
    for index in range(NUM_FRAMES):
        frames[index, :HEIGHT] = 60 + 120 * ((np.arange(WIDTH) + 4 * index) // 16 % 2)
    path = tmp_path / "reference.i420"
    frames.tofile(path)
    return path


def worse(clip: Path) -> Path:
    frames = np.fromfile(clip, np.uint8).reshape(NUM_FRAMES, -1, WIDTH)
    noise = np.random.default_rng(0).integers(-90, 90, frames.shape)
    path = clip.with_name("candidate.i420")
    (frames + noise).clip(0, 255).astype(np.uint8).tofile(path)
    return path


def test_a_clip_is_as_good_as_itself_and_noise_is_worse(clip: Path) -> None:
    assert has_vmaf()
    same = vmaf(clip, reference=clip, width=WIDTH, height=HEIGHT)
    noisy = vmaf(worse(clip), reference=clip, width=WIDTH, height=HEIGHT)
    assert same > 90
    assert noisy < same - 10


def test_a_clip_that_is_not_there_is_named(clip: Path) -> None:
    with pytest.raises(VideoError, match=r"comparing clips with libvmaf(.|\n)*gone\.i420"):
        vmaf(clip.with_name("gone.i420"), reference=clip, width=WIDTH, height=HEIGHT)


def test_an_ffmpeg_without_the_filter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [" TS psnr              VV->V      Calculate the PSNR between two video streams."]
    without = Finished(exit_code=0, output=listed, messages=[])
    monkeypatch.setattr(storage.vmaf, "run_ffmpeg", lambda arguments: without)
    assert not has_vmaf()
