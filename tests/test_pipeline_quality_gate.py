"""The gate of each preset at its limits, and the interval that one of them stands on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from manifests.presets import PRESETS
from pipeline.quality.compare import Difference
from pipeline.quality.gate import Limits, has_passed, judge, limits_of, verdict
from pipeline.quality.paired import PairedShares, interval, paired_shares

NOTHING = Limits(why_unlike="no limit is set for it here")
FINE = Difference(psnr_db=40.0, ssim=0.99, flicker_ratio=1.0, num_black=0, num_frozen=0, num_frames=17)


def passes(limits: Limits, *differences: Difference, **changes: Any) -> bool:
    given: dict[str, Any] = {"num_missing": 0, "adherence": None, **changes}
    return has_passed(judge(differences or (FINE,), limits=limits, **given))


def gate(preset: str, **changes: Any) -> Limits:
    return limits_of(preset, against="exact", same_weights=True, **changes)


def shares(*, lost: int, gained: int, num_clips: int) -> PairedShares:
    """Of clips that are all right otherwise."""
    kept = num_clips - lost - gained
    return paired_shares(
        [True] * kept + [True] * lost + [False] * gained, [True] * kept + [False] * lost + [True] * gained
    )


def test_every_preset_has_its_limits() -> None:
    as_fast = Limits(lost_frac=0.02, interval_frac=0.04, psnr_db=25.0, ssim=0.9)
    wanted = dict.fromkeys(PRESETS, as_fast) | {
        "exact": NOTHING,
        "fp8": Limits(lost_frac=0.01, interval_frac=0.02, psnr_db=30.0),
        "turbo": Limits(lost_frac=0.1, why_unlike="few steps make another video of the same noise"),
    }
    assert {preset: gate(preset) for preset in PRESETS} == wanted


def test_nothing_is_asked_of_the_same_weights_in_the_same_preset() -> None:
    for preset in PRESETS:
        assert limits_of(preset, against=preset, same_weights=True) == NOTHING


def test_other_weights_must_show_what_is_asked_for_but_look_alike_in_no_preset() -> None:
    for preset in PRESETS:
        for against in PRESETS:
            limits = limits_of(preset, against=against, same_weights=False)
            assert limits.lost_frac is not None, (preset, against)
            assert limits.psnr_db is limits.ssim is None
            assert limits.why_unlike is not None
    assert limits_of("exact", against="exact", same_weights=False).interval_frac == 0.04


@pytest.mark.parametrize(
    ("preset", "clip", "passed"),
    [
        ("fast", replace(FINE, psnr_db=25.0, ssim=0.9), True),
        ("fast", replace(FINE, psnr_db=24.99), False),
        ("fast", replace(FINE, ssim=0.899), False),
        ("fast", replace(FINE, psnr_db=math.inf), True),
        ("step-cache", replace(FINE, psnr_db=24.99), False),
        ("fp8", replace(FINE, psnr_db=30.0, ssim=0.5), True),
        ("fp8", replace(FINE, psnr_db=29.9), False),
        ("turbo", replace(FINE, psnr_db=9.0, ssim=0.1), True),
        ("exact", replace(FINE, psnr_db=9.0, ssim=0.1), True),
    ],
)
def test_likeness_decides_at_its_limit(preset: str, clip: Difference, passed: bool) -> None:
    assert passes(gate(preset), clip) is passed


def test_likeness_is_that_of_the_median_clip() -> None:
    bad = replace(FINE, psnr_db=10.0, ssim=0.2)
    assert passes(gate("fast"), FINE, FINE, bad)
    assert not passes(gate("fast"), FINE, bad, bad)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_no_preset_lets_a_broken_clip_pass(preset: str) -> None:
    clips = [FINE] * 20
    assert passes(gate(preset), *clips)
    assert not passes(gate(preset), *clips, replace(FINE, num_black=1))
    assert not passes(gate(preset), *clips, replace(FINE, num_frozen=9))
    assert passes(gate(preset), *clips, replace(FINE, num_frozen=8))
    assert not passes(gate(preset), *clips, num_missing=1)
    assert not has_passed(judge([], num_missing=0, adherence=None, limits=gate(preset)))


@pytest.mark.parametrize(
    ("preset", "lost", "gained", "num_clips", "passed"),
    [
        ("fp8", 6, 0, 600, True),  # 1 point
        ("fp8", 7, 0, 600, False),
        ("fp8", 30, 27, 600, False),  # half a point, but so many changed that it may be more than 2
        ("fast", 12, 0, 600, True),
        ("fast", 13, 0, 600, False),
        ("fast", 0, 90, 600, True),  # a gain is no fault
        ("turbo", 60, 0, 600, True),
        ("turbo", 61, 0, 600, False),
        ("turbo", 10, 0, 100, True),
        ("exact", 600, 0, 600, True),
    ],
)
def test_adherence_decides_at_its_limit(
    preset: str, lost: int, gained: int, num_clips: int, passed: bool
) -> None:
    adherence = shares(lost=lost, gained=gained, num_clips=num_clips)
    assert passes(gate(preset), adherence=adherence) is passed


def test_few_clips_are_judged_by_their_difference_alone_and_it_says_so() -> None:
    checks = judge(
        [FINE], num_missing=0, adherence=shares(lost=0, gained=0, num_clips=136), limits=gate("fp8")
    )
    assert (checks[-1].passed, checks[-1].note) == (None, "136 clips are too few for it: 137 would do")
    assert has_passed(checks)
    enough = judge(
        [FINE], num_missing=0, adherence=shares(lost=0, gained=0, num_clips=137), limits=gate("fp8")
    )
    assert (enough[-1].passed, enough[-1].note) == (True, None)
    assert not passes(gate("fast"), adherence=shares(lost=1, gained=0, num_clips=12))


def test_without_a_known_truth_adherence_is_not_asked_for() -> None:
    checks = judge([FINE], num_missing=0, adherence=None, limits=gate("fast"))
    assert [(check.passed, check.note) for check in checks if check.name.startswith("adherence")] == [
        (None, "nobody knows what these prompts must show")
    ] * 2
    assert has_passed(checks)


def test_what_is_not_judged_is_said_with_what_is() -> None:
    """Of few-step clips of a user's own prompts neither likeness nor adherence is known."""
    present = "compared clips, clips without frames, black clips, frozen clips"

    def said(preset: str, clip: Difference = FINE, **given: Any) -> str:
        return verdict(judge([clip], limits=gate(preset), **{"num_missing": 0, "adherence": None, **given}))

    unlike = replace(FINE, psnr_db=9.0, ssim=0.1)
    assert said("turbo", unlike) == (
        f"passed: {present}; not asked for: median PSNR, median SSIM, adherence lost"
    )
    checks = judge([unlike], num_missing=0, adherence=None, limits=gate("turbo"))
    likeness = [check for check in checks if check.name.startswith("median")]
    assert [(check.value, check.limit, check.note) for check in likeness] == [
        (9.0, None, "few steps make another video of the same noise"),
        (0.1, None, "few steps make another video of the same noise"),
    ]
    asked = shares(lost=0, gained=0, num_clips=200)
    assert said("turbo", adherence=asked).endswith("adherence lost; not asked for: median PSNR, median SSIM")
    assert said("exact", adherence=asked).endswith("not asked for: median PSNR, median SSIM, adherence lost")
    assert said("fast", adherence=asked) == said("fp8", adherence=asked) == "passed"
    assert said("fast", unlike, num_missing=1, adherence=asked) == (
        "failed: clips without frames, median PSNR, median SSIM"
    )
    assert said("turbo", replace(FINE, num_black=1)) == (
        "failed: black clips; not asked for: median PSNR, median SSIM, adherence lost"
    )
    assert "median" not in verdict(judge([], num_missing=1, adherence=None, limits=gate("turbo")))


def test_the_interval_is_its_formula() -> None:
    lost, gained = 4 / 102, 2 / 102
    half = 1.959964 * math.sqrt((lost + gained - (gained - lost) ** 2) / 102)
    assert interval(num_lost=3, num_gained=1, num_clips=100) == pytest.approx(
        (gained - lost - half, gained - lost + half), abs=1e-6
    )
    assert interval(num_lost=1, num_gained=0, num_clips=1)[0] == -1.0


@pytest.mark.parametrize(("lost", "gained"), [(0.02, 0.01), (0.05, 0.05), (0.2, 0.1)])
def test_the_interval_covers_the_truth_in_95_of_100_cases(lost: float, gained: float) -> None:
    """Summed over all that 100 clips can show, not drawn."""
    covered, num_clips = 0.0, 100
    for a in range(num_clips + 1):
        for b in range(num_clips + 1 - a):
            low, high = interval(num_lost=a, num_gained=b, num_clips=num_clips)
            if low <= gained - lost <= high:
                ways = math.comb(num_clips, a) * math.comb(num_clips - a, b)
                covered += ways * lost**a * gained**b * (1 - lost - gained) ** (num_clips - a - b)
    assert covered > 0.94


def test_shares_are_paired_over_clips() -> None:
    found = paired_shares([True, True, False, False], [True, False, True, True])
    assert (found.reference_frac, found.candidate_frac, found.difference_frac) == (0.5, 0.75, 0.25)
    assert found.low_frac < 0.25 < found.high_frac
