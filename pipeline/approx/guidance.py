"""Guidance for less than two forwards a step.

Reuse: what guidance adds, the prompt's velocity minus the negative prompt's, changes little from one step
to the next once the picture is laid out. From a fraction of the schedule on each difference serves what
comes soon after its own step too. This is the plain form of what Lv et al. 2024 do (FasterCache, arXiv
2410.19355), who reuse it for longer and weigh its low and high frequencies apart. Which steps reuse one
follows from the schedule, and from the steps that a step cache left out, not from the clips.

Interval: steps of much and of little noise are not guided (Kynkaanniemi et al. 2024, arXiv 2404.07724).
"""

from __future__ import annotations

from pipeline.sampling.schedules import Step

# Of the schedule's steps, how far behind its own a difference still serves: one of 20, two of 50. In the
# built-in model's late steps a difference changes by a fifth from one of 20 steps to the next, by two fifths
# over two. Of 200 clips, with a step cache as well, 1.5 points less show what was asked for if it serves one
# step more, 2.0 with two, 4.0 with three. Extrapolated from the last two it loses 40 points and more.
_SERVED_FRAC = 0.05
_ROUNDING = 1e-9  # of a fraction times a whole number


def is_guided(step: Step, *, interval: tuple[float, float] | None) -> bool:
    """interval: noise levels, from the higher to the lower."""
    if step.guidance_scale == 1.0:
        return False
    return interval is None or interval[0] >= step.noise_level >= interval[1]


def reuses_difference(step: Step, *, reuse_from: float | None, num_steps: int, kept_from: int) -> bool:
    """reuse_from: the fraction of the schedule after which a difference serves again. kept_from: the index of
    the step whose difference is at hand."""
    is_late = reuse_from is not None and step.index >= reuse_from * num_steps
    return is_late and step.index - kept_from <= _SERVED_FRAC * num_steps + _ROUNDING
