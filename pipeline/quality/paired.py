"""Two shares over the same clips, and how sure their difference is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

_Z = NormalDist().inv_cdf(0.975)  # of a 95 % interval


@dataclass(frozen=True, kw_only=True)
class PairedShares:
    """Shares of clips, 0 to 1, and candidate - reference with its 95 % interval."""

    num_clips: int
    reference_frac: float
    candidate_frac: float
    difference_frac: float
    low_frac: float
    high_frac: float


def paired_shares(reference: Sequence[bool], candidate: Sequence[bool]) -> PairedShares:
    """What is right on each side, clip by clip; at least one.

    The interval is Bonett and Price's for paired proportions (Adjusted Wald intervals for a difference of
    binomial proportions based on paired data, Journal of Educational and Behavioral Statistics 37, 2012):
    Wald's with one more clip lost and one more gained, which keeps its coverage where few or no clips differ.
    """
    num_clips = len(reference)
    assert num_clips == len(candidate) > 0, (num_clips, len(candidate))
    num_lost = sum(before and not after for before, after in zip(reference, candidate, strict=True))
    num_gained = sum(after and not before for before, after in zip(reference, candidate, strict=True))
    low, high = interval(num_lost=num_lost, num_gained=num_gained, num_clips=num_clips)
    return PairedShares(
        num_clips=num_clips,
        reference_frac=sum(reference) / num_clips,
        candidate_frac=sum(candidate) / num_clips,
        difference_frac=(num_gained - num_lost) / num_clips,
        low_frac=low,
        high_frac=high,
    )


def interval(*, num_lost: int, num_gained: int, num_clips: int) -> tuple[float, float]:
    """The 95 % interval of (gained - lost) / clips."""
    lost, gained = (num_lost + 1) / (num_clips + 2), (num_gained + 1) / (num_clips + 2)
    half = _Z * math.sqrt((lost + gained - (gained - lost) ** 2) / (num_clips + 2))
    return max(-1.0, gained - lost - half), min(1.0, gained - lost + half)
