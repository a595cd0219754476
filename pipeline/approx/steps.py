"""A batch's velocities where not every step, and not every branch of it, is computed.

Shapes: B clips, C latent channels, T latent frames, H and W latent sides.
"""

from __future__ import annotations

import torch

from pipeline.approx.guidance import is_guided, reuses_difference
from pipeline.approx.presets import Approximation
from pipeline.approx.step_cache import SkipByChange, SkipEvenly, Skipping, StepCache
from pipeline.models.protocol import Denoiser
from pipeline.sampling.schedules import Step
from pipeline.sampling.velocity import Forwards, SparseIn, always_dense, num_forwards


class ApproximateVelocity:
    """A Velocity: in place of a plain call of the denoiser.

    num_steps: of the whole schedule. last_index: of the expert's last step.

    The step cache decides first; of the steps that it leaves, guidance decides about the negative prompt's
    half. A step left out takes the prompt's velocity from the cache and the difference that guidance
    needs from the last step that had it: for either branch that is its latents plus an offset of its own.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        *,
        last_index: int,
        approximation: Approximation,
        num_steps: int,
        forwards: Forwards,
        sparse_in: SparseIn = always_dense,
    ) -> None:
        self._denoiser = denoiser
        self._approximation = approximation
        self._num_steps = num_steps
        self._forwards = forwards
        self._sparse_in = sparse_in
        skipping = _skipping(approximation, num_steps=num_steps)
        self._cache = (
            None if skipping is None else StepCache(skipping, num_steps=num_steps, last_index=last_index)
        )
        self._difference_BCTHW: torch.Tensor | None = None
        self._difference_index = 0

    def __call__(self, latents_BCTHW: torch.Tensor, *, own_index: int, step: Step) -> torch.Tensor:
        """The guided velocity in fp32. own_index: among the expert's own steps."""
        guides = is_guided(step, interval=self._approximation.guidance_interval)
        velocity_BCTHW = (
            None if self._cache is None else self._cache.velocity(latents_BCTHW, index=step.index)
        )
        num_computed = 0
        if velocity_BCTHW is None or (guides and self._difference_BCTHW is None):
            velocity_BCTHW, num_computed = self._computed(latents_BCTHW, own_index, step, guides=guides)
        self._forwards.computed += num_computed
        self._forwards.skipped += num_forwards(step) - num_computed
        if not guides:
            return velocity_BCTHW
        assert self._difference_BCTHW is not None
        return torch.add(velocity_BCTHW, self._difference_BCTHW, alpha=step.guidance_scale - 1)

    def _computed(
        self, latents_BCTHW: torch.Tensor, own_index: int, step: Step, *, guides: bool
    ) -> tuple[torch.Tensor, int]:
        reuses = self._difference_BCTHW is not None and reuses_difference(
            step,
            reuse_from=self._approximation.guidance_reuse_from,
            num_steps=self._num_steps,
            kept_from=self._difference_index,
        )
        needs_both = guides and not reuses
        conditional, *others = self._denoiser.branches(
            latents_BCTHW, index=own_index, is_guided=needs_both, sparse=self._sparse_in(step)
        )
        if others:
            self._difference_BCTHW, self._difference_index = conditional - others[0], step.index
        if self._cache is not None:
            self._cache.computed(latents_BCTHW, conditional)
        return conditional, 1 + len(others)


def _skipping(approximation: Approximation, *, num_steps: int) -> Skipping | None:
    if approximation.skipped_frac is not None:
        return SkipEvenly(
            SkipByChange(limit=0.0), skipped_frac=approximation.skipped_frac, num_steps=num_steps
        )
    if approximation.step_cache_limit is not None:
        return SkipByChange(limit=approximation.step_cache_limit)
    return None
