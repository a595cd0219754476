"""What a preset promises, and whether a comparison keeps it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from manifests.presets import EXACT, FAST, PRESETS, TURBO
from pipeline.quality.compare import Difference
from pipeline.quality.paired import PairedShares, interval


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a gate asks for beside clips that are there and are neither black nor frozen; None: nothing.

    Adherence is the share of clips that show all that their captions say. lost_frac: how much of it the
    candidate may lose at most. interval_frac: how much at the lower end of the 95 % interval; a gain is no
    fault. psnr_db, ssim: at least, of the median clip: equal clips have an infinite PSNR, and a mean of
    decibels means little. What became of the worst clips, the checks for broken ones and the page show.
    """

    lost_frac: float | None = None
    interval_frac: float | None = None
    psnr_db: float | None = None
    ssim: float | None = None


_AS_FAST = Limits(lost_frac=0.02, interval_frac=0.04, psnr_db=25.0, ssim=0.9)
_LIMITS: Mapping[str, Limits] = {
    **dict.fromkeys(PRESETS, _AS_FAST),  # every switch as `fast` itself
    EXACT: Limits(),
    FAST: _AS_FAST,
    TURBO: Limits(lost_frac=0.1),
    "fp8": Limits(lost_frac=0.01, interval_frac=0.02, psnr_db=30.0),
}

_NO_TRUTH = "nobody knows what these prompts must show"


def limits_of(preset: str, *, against: str, same_weights: bool) -> Limits:
    """What `preset` promises when it is compared with `against`.

    Other weights give other clips of the same noise: nothing is asked of their likeness.
    """
    limits = Limits() if preset == against else _LIMITS[preset]
    return limits if same_weights else replace(limits, psnr_db=None, ssim=None)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that a gate asks for.

    value, limit: in `unit`, of a `share` 0 to 1; value is None where it is not known. relation: of value to
    limit, `at least` or `at most`. passed: None where it could not be asked for, with the reason in `note`.
    """

    name: str
    value: float | None
    relation: str
    limit: float
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
        *_likeness("median PSNR", (one.psnr_db for one in differences), limits.psnr_db, unit="dB"),
        *_likeness("median SSIM", (one.ssim for one in differences), limits.ssim, unit=""),
        *_adherence(adherence, limits),
    )


def has_passed(checks: Iterable[Check]) -> bool:
    return all(check.passed is not False for check in checks)


def _none_of(name: str, count: int) -> Check:
    return Check(name=name, value=count, relation="at most", limit=0, unit="", passed=count == 0)


def _at_least(name: str, value: float, limit: float, *, unit: str) -> Check:
    return Check(name=name, value=value, relation="at least", limit=limit, unit=unit, passed=value >= limit)


def _likeness(name: str, values: Iterable[float | None], limit: float | None, *, unit: str) -> list[Check]:
    known = [value for value in values if value is not None]
    return [] if limit is None or not known else [_at_least(name, median(known), limit, unit=unit)]


def _adherence(shares: PairedShares | None, limits: Limits) -> list[Check]:
    checks = []
    if limits.lost_frac is not None:
        lost = None if shares is None else 0 - shares.difference_frac
        note = _NO_TRUTH if shares is None else None
        checks.append(_at_most_lost("adherence lost", lost, limits.lost_frac, note=note))
    if limits.interval_frac is not None:
        lost = None if shares is None else 0 - shares.low_frac
        note = _NO_TRUTH if shares is None else _too_few(shares.num_clips, limits.interval_frac)
        checks.append(_at_most_lost("adherence lost, 95 % bound", lost, limits.interval_frac, note=note))
    return checks


def _at_most_lost(name: str, lost_frac: float | None, limit_frac: float, *, note: str | None) -> Check:
    # 6 of 600 clips are 1 %, whatever floats make of it.
    passed = None if note or lost_frac is None else lost_frac <= limit_frac + 1e-9
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
    return f"{num_clips} clips are too few for it: {_least_clips(limit_frac)} would do"


def _flawless_lost_frac(num_clips: int) -> float:
    return -interval(num_lost=0, num_gained=0, num_clips=num_clips)[0]


def _least_clips(limit_frac: float) -> int:
    """The fewest clips of which a flawless result stays within the limit."""
    return next(n for n in range(1, math.ceil(4 / limit_frac)) if _flawless_lost_frac(n) <= limit_frac)
