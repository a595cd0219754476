"""Which approximations a preset is made of. The preset `exact` never comes here.

Each is a switch of its own, so that what it costs and gives can be measured alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manifests.presets import FAST, TURBO


@dataclass(frozen=True, kw_only=True)
class Approximation:
    """What may differ from the reference; the defaults change nothing.

    fp8: linears and self-attention in e4m3, where the card has it. step_cache_limit: how much relative change
    of the velocity may add up before a step is computed again (step_cache.py). guidance_reuse_from: the
    fraction of the schedule after which what guidance adds is reused (guidance_reuse.py).
    guidance_interval: the noise levels, from high to low, between which steps are guided.
    sparse: skip blocks of keys in long self-attention (sparse.py).
    """

    fp8: bool = False
    step_cache_limit: float | None = None
    guidance_reuse_from: float | None = None
    guidance_interval: tuple[float, float] | None = None
    sparse: bool = False


_STEP_CACHE_LIMIT = 0.05
_GUIDANCE_REUSE_FROM = 0.5
_GUIDANCE_INTERVAL = (0.95, 0.2)

_APPROXIMATIONS: Mapping[str, Approximation] = {
    FAST: Approximation(
        fp8=True, step_cache_limit=_STEP_CACHE_LIMIT, guidance_reuse_from=_GUIDANCE_REUSE_FROM
    ),
    TURBO: Approximation(fp8=True),
    "fp8": Approximation(fp8=True),
    "step-cache": Approximation(step_cache_limit=_STEP_CACHE_LIMIT),
    "guidance-reuse": Approximation(guidance_reuse_from=_GUIDANCE_REUSE_FROM),
    "guidance-interval": Approximation(guidance_interval=_GUIDANCE_INTERVAL),
    "sparse": Approximation(sparse=True),
}


def approximation_of(preset: str) -> Approximation:
    """Of any preset but `exact`, by its name."""
    return _APPROXIMATIONS[preset]
