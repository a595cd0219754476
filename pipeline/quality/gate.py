"""What a preset promises, and whether a comparison keeps it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from manifests.presets import EXACT, FAST, PRESETS, TURBO
from manifests.wording import counted
from pipeline.quality.compare import Difference
from pipeline.quality.paired import PairedShares, interval


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a gate asks for beside clips that are there and are neither black nor frozen; None: nothing.

    Adherence is the share of clips that show all that their captions say. lost_frac: how much of it the
    candidate may lose at most. interval_frac: how much at the lower end of the 95 % interval; a gain is no
    fault. psnr_db, ssim: at least, of the median clip: equal clips have an infinite PSNR, and a mean of
    decibels means little. What became of the worst clips, the checks for broken ones and the page show.
    why_unlike: why neither is asked for, where neither is.
    """

    lost_frac: float | None = None
    interval_frac: float | None = None
    psnr_db: float | None = None
    ssim: float | None = None
    why_unlike: str | None = None


_FEW_STEPS = "few steps make another video of the same noise"
_OTHER_WEIGHTS = "other weights make another video of the same noise"
_NO_PROMISE = "no limit is set for it here"
_NO_TRUTH = "nobody knows what these prompts must show"

_NOTHING = Limits(why_unlike=_NO_PROMISE)
_AS_FAST = Limits(lost_frac=0.02, interval_frac=0.04, psnr_db=25.0, ssim=0.9)
_LIMITS: Mapping[str, Limits] = {
    **dict.fromkeys(PRESETS, _AS_FAST),  # every switch as `fast` itself
    EXACT: _NOTHING,
    FAST: _AS_FAST,
    TURBO: Limits(lost_frac=0.1, why_unlike=_FEW_STEPS),
    "fp8": Limits(lost_frac=0.01, interval_frac=0.02, psnr_db=30.0),
}

# Of other weights in the same preset, or in a more exact one, that a model is to be replaced by.
_NO_WORSE = Limits(lost_frac=0.02, interval_frac=0.04, why_unlike=_OTHER_WEIGHTS)


def limits_of(preset: str, *, against: str, same_weights: bool) -> Limits:
    """What `preset` promises when it is compared with `against`.

    Other weights give other clips of the same noise: nothing is asked of their likeness, but in every preset
    that they show what is asked for.
    """
    limits = _NOTHING if preset == against else _LIMITS[preset]
    if same_weights:
        return limits
    if limits.lost_frac is None:
        return _NO_WORSE
    return replace(limits, psnr_db=None, ssim=None, why_unlike=limits.why_unlike or _OTHER_WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that a gate asks for.

    value, limit: in `unit`, of a `share` 0 to 1; value is None where it is not known, limit where there is
    none. relation: of value to limit, `at least` or `at most`. passed: None where it was not asked for, with
    the reason in `note`.
    """

    name: str
    value: float | None
    relation: str
    limit: float | None
    unit: str
    passed: bool | None
    note: str | None = None


def judge(
    differences: Sequence[Difference], *, num_missing: int, adherence: PairedShares | None, limits: Limits
) -> tuple[Check, ...]:
    """differences: of the clips that both sides rendered. num_missing: clips that only the reference did.
    adherence: None where nobody knows what the clips should show."""
    return (
        _at_least("compared clips", len(differences), 1, unit=""),
        _none_of("clips without frames", num_missing),
        _none_of("black clips", sum(one.is_black for one in differences)),
        _none_of("frozen clips", sum(one.is_frozen for one in differences)),
        *_likeness(differences, limits),
        *_adherence(adherence, limits),
    )


def has_passed(checks: Iterable[Check]) -> bool:
    return all(check.passed is not False for check in checks)


def verdict(checks: Sequence[Check]) -> str:
    """`passed` where all was asked for; else which checks there were, or which failed, and which were not."""
    failed, passed, unasked = (
        ", ".join(check.name for check in checks if check.passed is outcome)
        for outcome in (False, True, None)
    )
    said = f"failed: {failed}" if failed else f"passed: {passed}" if unasked else "passed"
    return f"{said}; not asked for: {unasked}" if unasked else said


def _none_of(name: str, count: int) -> Check:
    return Check(name=name, value=count, relation="at most", limit=0, unit="", passed=count == 0)


def _at_least(name: str, value: float, limit: float, *, unit: str) -> Check:
    return Check(name=name, value=value, relation="at least", limit=limit, unit=unit, passed=value >= limit)


def _likeness(differences: Sequence[Difference], limits: Limits) -> list[Check]:
    checks = [
        _median("median PSNR", (one.psnr_db for one in differences), limits.psnr_db, unit="dB"),
        _median("median SSIM", (one.ssim for one in differences), limits.ssim, unit=""),
    ]
    if limits.why_unlike is not None:
        return [replace(check, note=limits.why_unlike) for check in checks if check.value is not None]
    return [check for check in checks if check.passed is not None]


def _median(name: str, values: Iterable[float | None], limit: float | None, *, unit: str) -> Check:
    known = [value for value in values if value is not None]
    value = median(known) if known else None
    passed = None if limit is None or value is None else value >= limit
    return Check(name=name, value=value, relation="at least", limit=limit, unit=unit, passed=passed)


def _adherence(shares: PairedShares | None, limits: Limits) -> list[Check]:
    lost = None if shares is None else 0 - shares.difference_frac
    note = _NO_TRUTH if shares is None else _NO_PROMISE if limits.lost_frac is None else None
    checks = [_at_most_lost("adherence lost", lost, limits.lost_frac, note=note)]
    if limits.interval_frac is not None:
        lost = None if shares is None else 0 - shares.low_frac
        note = _NO_TRUTH if shares is None else _too_few(shares.num_clips, limits.interval_frac)
        checks.append(_at_most_lost("adherence lost (95 % bound)", lost, limits.interval_frac, note=note))
    return checks


def _at_most_lost(name: str, lost_frac: float | None, limit_frac: float | None, *, note: str | None) -> Check:
    # 6 of 600 clips are 1 %, whatever floats make of it.
    passed = None if note or limit_frac is None or lost_frac is None else lost_frac <= limit_frac + 1e-9
    return Check(
        name=name,
        value=lost_frac,
        relation="at most",
        limit=limit_frac,
        unit="share",
        passed=passed,
        note=note,
    )


def _too_few(num_clips: int, limit_frac: float) -> str | None:
    """Where not even clips of which none changed would have so narrow an interval, it is not asked for."""
    if _flawless_lost_frac(num_clips) <= limit_frac:
        return None
    return f"{counted(num_clips, 'clip is', 'clips are')} too few for it: {_least_clips(limit_frac)} would do"


def _flawless_lost_frac(num_clips: int) -> float:
    return -interval(num_lost=0, num_gained=0, num_clips=num_clips)[0]


def _least_clips(limit_frac: float) -> int:
    """The fewest clips of which a flawless result stays within the limit."""
    return next(n for n in range(1, math.ceil(4 / limit_frac)) if _flawless_lost_frac(n) <= limit_frac)
