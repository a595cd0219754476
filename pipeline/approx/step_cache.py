"""Steps that are not computed, as their outcome can be told from the last ones that were.

After EasyCache (Zhou et al. 2025, arXiv 2507.02860). Between two steps that are close, the velocity changes
in proportion to the latents, at a rate that is learnt from the last two computed steps. While the relative
change predicted since the last computed step adds up to less than a limit, a step's velocity is its latents
plus the offset that velocity and latents had then. Nothing is calibrated.

Each clip's own changes decide, by the prompt's velocity alone, as published. But a batch leaves a step out
only when all of its clips may: a clip's pixels can then depend on its neighbours, as with no other
approximation. So they can on what becomes of those: beside a clip of NaNs, which may never skip, every step
is computed; and a job that is tried again alone, or in a smaller batch, skips by other clips than before.
Padding copies the batch's first clip, so it agrees with it.

Shapes: B clips, C latent channels, T latent frames, H and W latent sides.
"""

from __future__ import annotations

from typing import Protocol

import torch

# Of the schedule, at its start: the picture is laid out there, and the rate is not steady yet. As published.
_COMPUTED_FIRST_FRAC = 0.2
_ROUNDING = 1e-9  # of a fraction times a whole number


class Skipping(Protocol):
    """Which steps are left out."""

    def computed(self, latents_BCTHW: torch.Tensor, velocity_BCTHW: torch.Tensor) -> None:
        """Learn from a step that was computed."""

    def may_skip(self, latents_BCTHW: torch.Tensor, *, index: int) -> bool:
        """Whether to leave out the step at these latents. index: in the schedule. Asked once a step."""


class SkipByChange:
    """limit: of the relative change that is predicted since the last computed step, added up.

    A step that is asked about costs one wait for the device.
    """

    def __init__(self, *, limit: float) -> None:
        self._limit = limit
        self._rate_B: torch.Tensor | None = None
        self._sum_B: torch.Tensor | float = 0.0
        self._seen_BCTHW: torch.Tensor | None = None  # the latents of the last step, computed or not
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # latents and velocity, last computed

    def computed(self, latents_BCTHW: torch.Tensor, velocity_BCTHW: torch.Tensor) -> None:
        if self._last is not None:
            last_latents, last_velocity = self._last
            moved_B = _mean_change(latents_BCTHW, last_latents)
            self._rate_B = _mean_change(velocity_BCTHW, last_velocity) / moved_B
        self._last = (latents_BCTHW, velocity_BCTHW)
        self._seen_BCTHW = latents_BCTHW
        self._sum_B = 0.0

    def may_skip(self, latents_BCTHW: torch.Tensor, *, index: int) -> bool:
        if self._rate_B is None or self._last is None or self._seen_BCTHW is None:
            return False
        _, velocity_BCTHW = self._last
        moved_B = _mean_change(latents_BCTHW, self._seen_BCTHW)
        self._sum_B = self._sum_B + self._rate_B * moved_B / velocity_BCTHW.abs().flatten(1).mean(dim=1)
        self._seen_BCTHW = latents_BCTHW
        return bool((self._sum_B < self._limit).all())


class SkipEvenly:
    """A given fraction of the schedule's steps, whatever they hold: for timing.

    asked: what decides from data. It is asked too, and not heeded, so that a step costs what it costs there.
    num_steps: of the schedule. Fewer are left out where the steps that may be are not as many.
    """

    def __init__(self, asked: Skipping, *, skipped_frac: float, num_steps: int) -> None:
        self._asked = asked
        self._first = num_protected(num_steps)
        num_open = max(1, num_steps - self._first - 1)
        self._frac = min(1.0, skipped_frac * num_steps / num_open)

    def computed(self, latents_BCTHW: torch.Tensor, velocity_BCTHW: torch.Tensor) -> None:
        self._asked.computed(latents_BCTHW, velocity_BCTHW)

    def may_skip(self, latents_BCTHW: torch.Tensor, *, index: int) -> bool:
        self._asked.may_skip(latents_BCTHW, index=index)
        place = index - self._first
        return int((place + 1) * self._frac + _ROUNDING) > int(place * self._frac + _ROUNDING)


class StepCache:
    """Of one expert, for one batch. num_steps: of the whole schedule. last_index: of the expert's last step.

    The first fifth of the schedule and an expert's first two steps and last one are always computed.
    """

    def __init__(self, skipping: Skipping, *, num_steps: int, last_index: int) -> None:
        self._skipping = skipping
        self._num_protected = num_protected(num_steps)
        self._last_index = last_index
        self._offset_BCTHW: torch.Tensor | None = None
        self._num_computed = 0

    def computed(self, latents_BCTHW: torch.Tensor, velocity_BCTHW: torch.Tensor) -> None:
        """Keep what a step gave. Both tensors are left alone from now on."""
        self._num_computed += 1
        self._offset_BCTHW = velocity_BCTHW - latents_BCTHW
        self._skipping.computed(latents_BCTHW, velocity_BCTHW)

    def velocity(self, latents_BCTHW: torch.Tensor, *, index: int) -> torch.Tensor | None:
        """Without computing it; None where the step must be computed. Asked once for each step."""
        is_open = self._num_protected <= index < self._last_index and self._num_computed >= 2
        if not is_open or not self._skipping.may_skip(latents_BCTHW, index=index):
            return None
        assert self._offset_BCTHW is not None
        return latents_BCTHW + self._offset_BCTHW


def num_protected(num_steps: int) -> int:
    """How many steps at a schedule's start are always computed."""
    return max(2, round(_COMPUTED_FIRST_FRAC * num_steps))


def _mean_change(after_BCTHW: torch.Tensor, before_BCTHW: torch.Tensor) -> torch.Tensor:
    return (after_BCTHW - before_BCTHW).abs().flatten(1).mean(dim=1)
