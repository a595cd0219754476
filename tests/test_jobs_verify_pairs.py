"""Pairs of clips in files: compared in this process or in others alike, with VMAF where it says something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jobs.verification.pairs
from jobs.verification.pairs import KeptClip, Pair, compare_pair, compare_pairs
from pipeline.models.tiny.captions import Case
from pipeline.quality.colours import COLOUR_RGB

TRUTH = Case(caption="a red square that moves right", colour="red", shape="square", motion="right")


def kept(path: Path, *, width: int = 64, height: int = 64, num_frames: int = 5, seed: int = 0) -> KeptClip:
    frames = np.random.default_rng(seed).integers(40, 220, (num_frames, height * 3 // 2, width), np.uint8)
    frames.tofile(path)
    return KeptClip(path=path, width=width, height=height, num_frames=num_frames)


def square(path: Path, *, step: int, colour: str = "red") -> KeptClip:
    """On a white background, `step` pixels to the right from frame to frame."""
    frames = np.full((9, 96, 64), 128, np.uint8)
    frames[:, :64] = 235
    red, green, blue = (value / 255 for value in COLOUR_RGB[colour])
    luma = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    for index in range(9):
        left = 4 + step * index
        frames[index, 24:40, left : left + 16] = round(16 + 219 * luma)
        for plane, value in ((0, (blue - luma) / 1.8556), (1, (red - luma) / 1.5748)):
            chroma = frames[index, 64:].reshape(2, 32, 32)[plane]
            chroma[12:20, left // 2 : left // 2 + 8] = round(128 + 224 * value)
    frames.tofile(path)
    return KeptClip(path=path, width=64, height=64, num_frames=9)


def pair(
    reference: KeptClip, candidate: KeptClip, *, truth: Case | None = None, with_vmaf: bool = True
) -> Pair:
    return Pair(id="a", reference=reference, candidate=candidate, truth=truth, with_vmaf=with_vmaf)


def test_what_both_sides_show_is_told_apart(tmp_path: Path) -> None:
    right = square(tmp_path / "right", step=4)
    assert compare_pair(pair(right, right, truth=TRUTH)).is_lost is False
    still = compare_pair(pair(right, square(tmp_path / "still", step=0), truth=TRUTH))
    assert still.reference is not None
    assert still.candidate is not None
    assert (still.reference.right, still.candidate.right) == ((True, True, True), (True, True, False))
    assert (still.candidate.reading.motion, still.is_lost) == ("still", True)
    blue = compare_pair(pair(square(tmp_path / "blue", step=4, colour="blue"), right, truth=TRUTH))
    assert blue.is_lost is False  # what the reference never showed cannot be lost
    assert compare_pair(pair(right, right)).reference is None
    green = square(tmp_path / "green", step=4, colour="green")
    still_green = square(tmp_path / "still green", step=0, colour="green")
    assert compare_pair(pair(green, still_green, truth=TRUTH)).is_lost is False


def test_vmaf_is_of_large_clips_of_one_size(tmp_path: Path) -> None:
    large = kept(tmp_path / "large", width=640, height=480, num_frames=2)
    found = compare_pair(pair(large, large)).vmaf
    assert found is not None
    assert found > 90
    assert compare_pair(pair(large, large, with_vmaf=False)).vmaf is None
    small = kept(tmp_path / "small")
    assert compare_pair(pair(small, small)).vmaf is None
    longer = kept(tmp_path / "longer", width=640, height=480, num_frames=3)
    assert compare_pair(pair(large, longer)).vmaf is None


def test_vmaf_is_asked_of_the_candidate_against_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        jobs.verification.pairs, "vmaf", lambda candidate, **given: asked.append((candidate, given)) or 75.0
    )
    reference, candidate = (kept(tmp_path / name, width=640, height=480) for name in ("one", "other"))
    assert compare_pair(pair(reference, candidate)).vmaf == 75.0
    assert asked == [(candidate.path, {"reference": reference.path, "width": 640, "height": 480})]
    low = kept(tmp_path / "low", width=640, height=478)
    upright = kept(tmp_path / "upright", width=480, height=640)
    assert compare_pair(pair(low, low)).vmaf is None
    assert compare_pair(pair(reference, upright)).vmaf is None
    assert len(asked) == 1


def test_other_processes_find_the_same_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = kept(tmp_path / "reference")
    pairs = [
        replace(pair(reference, kept(tmp_path / str(seed), seed=seed)), id=str(seed)) for seed in range(5)
    ]
    alone = compare_pairs(pairs)
    assert [one.id for one in alone] == ["0", "1", "2", "3", "4"]
    assert compare_pairs([]) == []
    monkeypatch.setattr(jobs.verification.pairs, "_WORTH_PROCESSES_BYTES", 0)
    assert compare_pairs(pairs) == alone
