"""A batch whose steps are not all computed: which forwards remain, and what their velocities are."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.approx.presets import Approximation
from pipeline.approx.steps import ApproximateVelocity
from pipeline.engine import Engine
from pipeline.models import wan_denoiser
from pipeline.models.resolve import ResolvedModel, resolve_model
from pipeline.models.wan_denoiser import WanDenoiser
from pipeline.rendering import Rendering
from pipeline.sampling.guidance import guided
from pipeline.sampling.schedules import Step, make_schedule
from pipeline.sampling.velocity import Forwards, PlainVelocity, Velocity
from tests.pipeline_checkpoints import build_checkpoint, make_batch, make_engine, make_job

NUM_STEPS, SCALE = 20, 3.0
SHAPE = (2, 3, 1, 2, 2)


class FakeDenoiser:
    """Prompt and negative prompt pull latents to places of their own. calls: index and branches of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(
        self, latents_BCTHW: torch.Tensor, *, index: int, guidance_scale: float, sparse: Any = None
    ) -> torch.Tensor:
        branches = self.branches(latents_BCTHW, index=index, is_guided=guidance_scale != 1.0)
        return guided(*branches, scale=guidance_scale) if len(branches) == 2 else branches[0]

    def branches(
        self, latents_BCTHW: torch.Tensor, *, index: int, is_guided: bool, sparse: Any = None
    ) -> tuple[torch.Tensor, ...]:
        self.calls.append((index, 2 if is_guided else 1))
        conditional = latents_BCTHW.tanh() - 0.1 * index
        return (conditional, conditional - 1 - 0.01 * index**2)[: 2 if is_guided else 1]


def schedule(scale: float = SCALE) -> tuple[Step, ...]:
    timesteps = torch.linspace(1000, 50, NUM_STEPS)
    return make_schedule(timesteps, boundary_timestep=None, guidance_scale=scale, guidance_scale_2=None)


def walk(velocity: Velocity, steps: Sequence[Step]) -> list[torch.Tensor]:
    """The velocities on the way, step by step, from noise."""
    latents = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    velocities = []
    for step in steps:
        velocities.append(velocity(latents, own_index=step.index, step=step))
        latents = latents - 0.05 * velocities[-1]
    return velocities


class Walk:
    """calls: how many branches each step computed, 0 for one left out."""

    def __init__(self, approximation: Approximation | None, *, scale: float = SCALE) -> None:
        denoiser, self.forwards, steps = FakeDenoiser(), Forwards(), schedule(scale)
        last_index = steps[-1].index
        velocity: Velocity = (
            PlainVelocity(denoiser, last_index=last_index, forwards=self.forwards)
            if approximation is None
            else ApproximateVelocity(
                denoiser,
                last_index=last_index,
                approximation=approximation,
                num_steps=len(steps),
                forwards=self.forwards,
            )
        )
        self.velocities = walk(velocity, steps)
        calls = dict(denoiser.calls)
        assert len(calls) == len(denoiser.calls)  # none twice
        self.calls = [calls.get(step.index, 0) for step in steps]


APPROXIMATIONS = [
    Approximation(step_cache_limit=0.3),
    Approximation(guidance_reuse_from=0.5),
    Approximation(guidance_interval=(0.8, 0.3)),
    Approximation(step_cache_limit=0.3, guidance_reuse_from=0.3),
    Approximation(step_cache_limit=0.3, guidance_interval=(0.8, 0.3)),
    Approximation(skipped_frac=0.5),
]


@pytest.mark.parametrize("scale", [SCALE, 1.0])
@pytest.mark.parametrize("approximation", APPROXIMATIONS, ids=str)
def test_computed_and_skipped_forwards_add_up_to_the_references(
    approximation: Approximation, scale: float
) -> None:
    walked, plain = Walk(approximation, scale=scale), Walk(None, scale=scale)
    assert walked.forwards.computed == sum(walked.calls)
    assert walked.forwards.computed + walked.forwards.skipped == plain.forwards.computed == sum(plain.calls)
    assert plain.forwards.skipped == 0


@pytest.mark.parametrize("scale", [SCALE, 1.0])
def test_where_nothing_is_left_out_velocities_are_the_references(scale: float) -> None:
    walked, plain = Walk(Approximation(step_cache_limit=0.0), scale=scale), Walk(None, scale=scale)
    assert walked.calls == plain.calls
    torch.testing.assert_close(walked.velocities, plain.velocities, rtol=1e-5, atol=1e-5)


def test_late_in_the_schedule_every_other_step_computes_the_prompt_alone() -> None:
    walked = Walk(Approximation(guidance_reuse_from=0.5))
    assert walked.calls == [2] * 10 + [1, 2] * 5


def test_a_reused_difference_is_that_of_the_step_before() -> None:
    steps = schedule()[10:12]
    denoiser = FakeDenoiser()
    velocity = ApproximateVelocity(
        denoiser,
        last_index=NUM_STEPS - 1,
        approximation=Approximation(guidance_reuse_from=0.0),
        num_steps=NUM_STEPS,
        forwards=Forwards(),
    )
    latents, later = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(4))
    velocity(latents, own_index=10, step=steps[0])
    reused = velocity(later, own_index=11, step=steps[1])
    conditional = later.tanh() - 0.1 * 11
    difference = 1 + 0.01 * 10**2
    torch.testing.assert_close(reused, conditional + (SCALE - 1) * difference)


def test_outside_the_interval_steps_take_the_prompts_velocity_alone() -> None:
    walked = Walk(Approximation(guidance_interval=(0.8, 0.3)))
    levels = [step.noise_level for step in schedule()]
    assert walked.calls == [2 if 0.8 >= level >= 0.3 else 1 for level in levels]
    latents = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    assert torch.equal(walked.velocities[0], latents.tanh())


@pytest.mark.parametrize(
    "approximation",
    [Approximation(guidance_reuse_from=0.0), Approximation(guidance_interval=(0.8, 0.3))],
    ids=str,
)
def test_with_guidance_off_what_saves_guidance_does_nothing(approximation: Approximation) -> None:
    walked, plain = Walk(approximation, scale=1.0), Walk(None, scale=1.0)
    assert walked.calls == plain.calls == [1] * NUM_STEPS
    for ours, reference in zip(walked.velocities, plain.velocities, strict=True):
        assert torch.equal(ours, reference)


def test_the_cache_decides_first_and_guidance_about_the_steps_it_leaves() -> None:
    cache = Walk(Approximation(skipped_frac=0.25)).calls
    both = Walk(Approximation(skipped_frac=0.25, guidance_reuse_from=0.3)).calls
    assert [num == 0 for num in both] == [num == 0 for num in cache]
    assert both.count(0) == 5
    first = 6  # 0.3 of the schedule
    assert both[:first] == cache[:first]
    for index in range(first, NUM_STEPS):
        # A difference serves the step after its own: behind a step left out it is too old.
        assert both[index] != 1 or both[index - 1] == 2
    assert 1 in both[first:]


def test_a_step_left_out_keeps_the_guidance_of_the_last_computed_one() -> None:
    walked = Walk(Approximation(step_cache_limit=math.inf))
    assert walked.calls == [2] * 4 + [0] * 15 + [2]
    latents = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    for velocity in walked.velocities[:3]:
        latents = latents - 0.05 * velocity
    offset = walked.velocities[3] - latents
    later = latents - 0.05 * walked.velocities[3]
    torch.testing.assert_close(walked.velocities[4], later + offset)


def test_a_step_that_must_be_guided_for_the_first_time_is_not_left_out() -> None:
    walked = Walk(Approximation(step_cache_limit=math.inf, guidance_interval=(0.6, 0.3)))
    first_guided = next(step.index for step in schedule() if step.noise_level <= 0.6)
    assert walked.calls[4:first_guided] == [0] * (first_guided - 4)
    assert walked.calls[first_guided] == 2


# What follows is the engine itself, over tiny checkpoints.

JOB_STEPS = 8


@pytest.fixture(scope="module")
def t2v(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    return resolve_model(str(build_checkpoint(tmp_path_factory.mktemp("t2v"), "t2v")))


@pytest.fixture(scope="module")
def a14b(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    return resolve_model(str(build_checkpoint(tmp_path_factory.mktemp("a14b"), "a14b")))


def render(model: ResolvedModel, engine: Engine, **settings: Any) -> Rendering:
    """Two jobs and padding."""
    jobs = [make_job(model, **{"steps": JOB_STEPS, **settings}, id=str(seed), seed=seed) for seed in (1, 2)]
    return engine.render(make_batch(model, *jobs, size=3))


class BuiltIn:
    """The built-in model: random weights change too much from step to step to be left out."""

    def __init__(self) -> None:
        self.model = resolve_model("builtin")
        self.engine = make_engine(self.model)
        self.exact = self.render("exact")

    def render(self, preset: str) -> Rendering:
        return render(self.model, self.engine, preset=preset, steps=20, width=16, height=16)


@pytest.fixture(scope="module")
def builtin() -> BuiltIn:
    return BuiltIn()


def with_approximation(model: ResolvedModel, approximation: Approximation) -> Engine:
    return Engine(make_engine(model).config, approximation=approximation)


def frames(rendering: Rendering) -> np.ndarray[Any, Any]:
    return np.stack([clip.frames for clip in rendering.clips if clip.frames is not None])


@pytest.mark.parametrize("scale", [5.0, 1.0])
def test_exact_computes_every_forward(t2v: ResolvedModel, scale: float) -> None:
    rendering = render(t2v, make_engine(t2v), guidance_scale=scale)
    assert rendering.steps_computed == JOB_STEPS * (1 if scale == 1.0 else 2)
    assert rendering.steps_skipped == 0


def test_exact_needs_nothing_that_changes_numbers(
    t2v: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("pipeline.approx")]:
        monkeypatch.setitem(sys.modules, name, None)  # whoever imports it now fails
    assert render(t2v, make_engine(t2v)).steps_skipped == 0
    with pytest.raises(ImportError):
        render(t2v, make_engine(t2v), preset="step-cache")


@pytest.mark.parametrize("preset", ["fast", "step-cache", "guidance-reuse", "guidance-interval"])
def test_a_preset_says_which_forwards_it_left_out(builtin: BuiltIn, preset: str) -> None:
    rendering = builtin.render(preset)
    assert 0 < rendering.steps_skipped < rendering.steps_computed
    assert rendering.steps_computed + rendering.steps_skipped == builtin.exact.steps_computed == 40
    assert not np.array_equal(frames(rendering), frames(builtin.exact))


@pytest.mark.parametrize("skipped_frac", [0.0, 0.25, 0.5])
def test_a_bench_leaves_out_the_share_it_names(t2v: ResolvedModel, skipped_frac: float) -> None:
    rendering = render(t2v, with_approximation(t2v, Approximation(skipped_frac=skipped_frac)))
    assert rendering.steps_skipped == 2 * skipped_frac * JOB_STEPS


def test_each_expert_begins_anew(a14b: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []  # of each expert, its own index
    denoisers: list[WanDenoiser] = []
    branches = WanDenoiser.branches

    def watched(denoiser: WanDenoiser, latents: torch.Tensor, **step: Any) -> tuple[torch.Tensor, ...]:
        if denoiser not in denoisers:
            denoisers.append(denoiser)
        calls.append((denoisers.index(denoiser), step["index"]))
        return branches(denoiser, latents, **step)

    monkeypatch.setattr(WanDenoiser, "branches", watched)
    engine = with_approximation(a14b, Approximation(step_cache_limit=math.inf))
    job = replace(make_job(a14b), steps=12, flow_shift=8.0)
    engine.render(make_batch(a14b, job))
    first, second = ([own for expert, own in calls if expert == number] for number in (0, 1))
    last = {0: max(first), 1: max(second)}
    assert first == [0, 1, last[0]]
    assert second == [0, 1, last[1]]
    assert last[0] + last[1] == 12 - 2


class Reused:
    """As a recorded forward: its results lie where the last call's lay."""

    def __init__(self, function: Any, *, enabled: bool) -> None:
        self._function = function
        self._outputs: tuple[torch.Tensor, ...] = ()

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        computed = self._function(*inputs)
        self._outputs = self._outputs or tuple(map(torch.empty_like, computed))
        for output, value in zip(self._outputs, computed, strict=True):
            output.copy_(value)
        return self._outputs


def test_branches_are_the_callers_to_keep_and_make_up_the_guided_velocity(
    t2v: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wan_denoiser, "Recorded", Reused)
    engine = make_engine(t2v)
    bucket = make_batch(t2v, make_job(t2v)).bucket
    with torch.inference_mode():
        model = engine._model(bucket)
        texts = model.encode(["the red cat", "blue"])
        denoiser = model.denoiser(texts[:1], texts[1:], timesteps=torch.tensor([900.0, 400.0]), expert=0)
        latents = torch.randn(1, *model.latent_shape(width=64, height=64, num_frames=9))
        kept = denoiser.branches(latents, index=0, is_guided=True)
        whole = denoiser(latents, index=0, guidance_scale=5.0)
        (alone,) = denoiser.branches(latents, index=0, is_guided=False)
        denoiser(-latents, index=1, guidance_scale=5.0)
        denoiser(-latents, index=1, guidance_scale=1.0)
    assert torch.equal(guided(*kept, scale=5.0), whole)
    assert torch.equal(alone, kept[0])
    assert not torch.equal(kept[0], kept[1])
