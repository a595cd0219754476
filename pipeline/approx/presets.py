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
    fraction of the schedule after which what guidance adds serves again (guidance.py).
    guidance_interval: the noise levels, from high to low, between which steps are guided (guidance.py).
    sparse_attention: self-attention between a share of all pairs of tokens, late in long clips
    (sparse_attention.py).
    skipped_frac: leave this fraction of the steps out whatever they hold, for timing alone.
    """

    fp8: bool = False
    step_cache_limit: float | None = None
    guidance_reuse_from: float | None = None
    guidance_interval: tuple[float, float] | None = None
    sparse_attention: bool = False
    skipped_frac: float | None = None

    @property
    def changes_steps(self) -> bool:
        """Whether any step may be other than two forwards."""
        return any(
            setting is not None
            for setting in (
                self.step_cache_limit,
                self.guidance_reuse_from,
                self.guidance_interval,
                self.skipped_frac,
            )
        )


# Chosen on the built-in model, 20 steps, by clips whose steps their own changes decide about: 72 captions
# that it was not trained on and that nothing was chosen by. With both, 48 % of the forwards are left out,
# the median clip is 40.5 dB from the exact one of the same noise (SSIM 0.990), and as many show what was
# asked for (85 %). On 60 others a limit of 0.2 left out 61 %, for 35.9 dB and two clips fewer; 0.1 50 %,
# for 41.5 dB and one fewer.
_STEP_CACHE_LIMIT = 0.1
_GUIDANCE_REUSE_FROM = 0.3
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
    "sparse-attention": Approximation(sparse_attention=True),
}


def approximation_of(preset: str) -> Approximation:
    """Of any preset but `exact`, by its name."""
    return _APPROXIMATIONS[preset]
