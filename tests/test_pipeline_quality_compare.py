"""Each measure against its definition, on clips where the right answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.quality.compare import compare, flicker, luma, psnr_db, ssim


def noisy(num_frames: int = 4, height: int = 34, width: int = 26, *, seed: int = 0) -> np.ndarray:
    """Moving frames that are neither black nor like each other; sides that no power of two divides."""
    rng = np.random.default_rng(seed)
    return rng.integers(60, 200, (num_frames, height * 3 // 2, width), dtype=np.uint8)


def still(level: int, num_frames: int = 4, height: int = 34, width: int = 26) -> np.ndarray:
    frames = np.full((num_frames, height * 3 // 2, width), 128, np.uint8)
    luma(frames)[...] = level
    return frames


def ssim_by_definition(x: np.ndarray, y: np.ndarray) -> float:
    """One picture, window by window, in float64."""
    offsets = np.arange(-5, 6)
    line = np.exp(-(offsets**2) / (2 * 1.5**2))
    weights = np.outer(line, line) / line.sum() ** 2
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    values = []
    for top in range(x.shape[0] - 10):
        for left in range(x.shape[1] - 10):
            a, b = (p[top : top + 11, left : left + 11].astype(np.float64) for p in (x, y))
            mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
            var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
            covariance = (weights * (a - mean_a) * (b - mean_b)).sum()
            values.append(
                (2 * mean_a * mean_b + c1)
                * (2 * covariance + c2)
                / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
            )
    return float(np.mean(values))


def test_equal_clips_differ_in_nothing() -> None:
    found = compare(noisy(), noisy())
    assert (found.psnr_db, found.ssim, found.flicker_ratio) == (math.inf, pytest.approx(1), 1)
    assert (found.num_black, found.num_frozen, found.is_black, found.is_frozen) == (0, 0, False, False)


@pytest.mark.parametrize("offset", [1, 7, 40])
def test_psnr_of_a_constant_offset_is_its_formula(offset: int) -> None:
    frames = noisy()
    assert psnr_db(frames, frames + np.uint8(offset)) == pytest.approx(20 * math.log10(255 / offset))


def test_psnr_counts_chroma_and_takes_one_error_of_the_whole_clip() -> None:
    frames = noisy()
    chroma = frames.copy()
    chroma[:, 34:] += 10  # a third of all samples
    assert psnr_db(frames, chroma) == pytest.approx(10 * math.log10(255**2 / (100 / 3)))
    one_bad = frames.copy()
    one_bad[0] += 20
    assert psnr_db(frames, one_bad) == pytest.approx(10 * math.log10(255**2 / (400 / 4)))


@pytest.mark.parametrize("size", [(34, 26), (12, 40), (22, 12)])
@pytest.mark.parametrize("strength", [3, 60])
def test_ssim_is_its_definition_window_by_window(size: tuple[int, int], strength: int) -> None:
    reference = noisy(2, *size)
    candidate = (reference + np.random.default_rng(1).integers(-strength, strength, reference.shape)).clip(
        0, 255
    )
    candidate = candidate.astype(np.uint8)
    wanted = np.mean(
        [ssim_by_definition(x, y) for x, y in zip(luma(reference), luma(candidate), strict=True)]
    )
    assert ssim(reference, candidate) == pytest.approx(wanted, abs=1e-5)


def test_ssim_of_flat_pictures_is_that_of_their_levels() -> None:
    a, b, c1 = 235.0, 225.0, (0.01 * 255) ** 2
    assert ssim(still(235), still(225)) == pytest.approx((2 * a * b + c1) / (a * a + b * b + c1), abs=1e-5)


def test_ssim_looks_at_luma_alone() -> None:
    other = noisy()
    other[:, 34:] = 128
    assert ssim(noisy(), other) == pytest.approx(1)


def test_flicker_is_the_mean_step_of_luma_and_a_ratio_of_the_reference() -> None:
    calm, wild = (np.concatenate([still(100 + step * n, 1) for n in range(4)]) for step in (2, 6))
    assert (flicker(calm), flicker(wild)) == (2, 6)
    assert compare(calm, wild).flicker_ratio == 3
    assert compare(still(90), calm).flicker_ratio is None
    assert flicker(still(90, 1)) == 0


def test_frames_are_black_only_where_the_reference_is_not() -> None:
    reference, candidate = noisy(), noisy()
    luma(candidate)[1] = 16
    found = compare(reference, candidate)
    assert (found.num_black, found.is_black) == (1, True)
    assert compare(candidate, candidate).num_black == 0
    assert compare(candidate, reference).num_black == 0


def test_a_dark_scene_that_gets_a_little_darker_is_not_black() -> None:
    dark = still(16)
    luma(dark)[:, :3] = 200  # 9 % of it is lit
    darker = still(16)
    assert compare(dark, darker).num_black == 0
    luma(dark)[:, :4] = 200  # 12 %
    assert compare(dark, darker).num_black == 4


def test_frames_are_frozen_only_where_the_reference_moves() -> None:
    moving, frozen = noisy(5), noisy(5)
    frozen[1:4] = frozen[0]
    found = compare(moving, frozen)
    assert (found.num_frozen, found.is_frozen) == (3, True)
    assert compare(frozen, frozen).num_frozen == 0
    half = noisy(5)
    half[1], half[3] = half[0], half[2]  # each picture twice: a stutter
    assert (compare(moving, half).num_frozen, compare(moving, half).is_frozen) == (2, False)
    assert not compare(still(90, 1), still(90, 1)).is_frozen


def test_clips_of_other_sizes_have_no_likeness_but_can_be_broken() -> None:
    reference = noisy(4)
    longer = noisy(6)
    longer[1:] = longer[0]
    found = compare(reference, longer)
    assert (found.psnr_db, found.ssim, found.num_frozen, found.is_frozen) == (None, None, 5, True)
    wide = compare(reference, noisy(4, 34, 30))
    assert (wide.psnr_db, wide.ssim, wide.num_black) == (None, None, 0)
    standing = np.concatenate([still(90, 3)])
    assert compare(standing, still(90, 5)).num_frozen == 0


def test_a_picture_smaller_than_the_window_has_no_ssim() -> None:
    found = compare(noisy(2, 10, 16), noisy(2, 10, 16))
    assert (found.ssim, found.psnr_db) == (None, math.inf)


@pytest.mark.parametrize(
    "frames",
    [np.zeros((0, 24, 16), np.uint8), np.zeros((2, 25, 16), np.uint8), np.zeros((2, 24, 16), np.float32)],
    ids=["no frames", "odd rows", "floats"],
)
def test_what_is_no_clip_is_refused(frames: np.ndarray) -> None:
    with pytest.raises(ValueError, match="frames are uint8"):
        compare(noisy(), frames)
