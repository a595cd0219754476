"""Our samplers against diffusers' schedulers in fp32, judged by how far those are from fp64 themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch._subclasses.fake_tensor import FakeTensorMode

from manifests.errors import ModelError, RenderError
from manifests.validate import LEAST_FLOW_SHIFT, MOST_FLOW_SHIFT
from pipeline.sampling.levels import noise_levels, sampler_settings
from pipeline.sampling.schedules import make_schedule
from pipeline.sampling.steppers import Stepper
from pipeline.sampling.unipc import unipc_updates

Velocity = Callable[[torch.Tensor, float], torch.Tensor]

SHIFTS = (1.0, 3.0, 5.0, 8.0)
STEPS = (1, 2, 3, 4, 5, 7, 8, 14, 15, 20, 33, 50)
SHAPE = (2, 3, 3, 5, 7)
WAN = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def unipc(flow_shift: float, **settings: Any) -> Any:
    return UniPCMultistepScheduler(flow_shift=flow_shift, **WAN, **settings)


def euler(flow_shift: float, **settings: Any) -> Any:
    return FlowMatchEulerDiscreteScheduler(shift=flow_shift, **settings)


KINDS = {"unipc": unipc, "euler": euler}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
shifts = pytest.mark.parametrize("shift", SHIFTS)


def config_of(scheduler: Any) -> dict[str, Any]:
    return {**scheduler.config, "_class_name": type(scheduler).__name__}


def velocity(latents: torch.Tensor, timestep: float) -> torch.Tensor:
    """Far from linear, and different at every timestep and place."""
    noise = timestep / 1000
    return 0.8 * (1.3 * latents).sin() + noise * latents - 0.3 * (2 * latents.flip(-1)).cos()


def start(shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def ours(
    scheduler: Any,
    steps: int,
    latents: torch.Tensor,
    *,
    shift: float,
    predict: Velocity = velocity,
) -> torch.Tensor:
    stepper = Stepper(config_of(scheduler), flow_shift=shift, steps=steps, device="cpu")
    for index, timestep in enumerate(stepper.timesteps.tolist()):
        latents = stepper.step(predict(latents, timestep), index=index, latents_BCTHW=latents)
    return latents


def theirs(
    scheduler: Any, steps: int, latents: torch.Tensor, *, predict: Velocity = velocity
) -> torch.Tensor:
    """In the latents' dtype, but for Euler, which diffusers always computes in fp32: then in fp64 by hand."""
    scheduler.set_timesteps(steps)
    scheduler.sigmas = scheduler.sigmas.to(latents.dtype)
    by_hand = isinstance(scheduler, FlowMatchEulerDiscreteScheduler) and latents.dtype == torch.float64
    for index, timestep in enumerate(scheduler.timesteps):
        predicted = predict(latents, timestep.item())
        if by_hand:
            latents = latents + (scheduler.sigmas[index + 1] - scheduler.sigmas[index]) * predicted
        else:
            latents = scheduler.step(predicted, timestep, latents).prev_sample
    return latents


def assert_as_close(make: Any, steps: int, *, shift: float, predict: Velocity = velocity) -> None:
    exact = theirs(make(shift), steps, start().double(), predict=predict)
    reference = theirs(make(shift), steps, start(), predict=predict)
    # The checkpoint's own shift is not the job's, and must not count.
    result = ours(make(1.7), steps, start(), shift=shift, predict=predict)
    own_error = (reference - exact).abs().max()
    assert result.dtype == torch.float32
    assert (result - reference).abs().max() <= 1.5 * own_error + 1e-6


@kinds
@shifts
@pytest.mark.parametrize("steps", STEPS)
def test_clean_latents_are_those_of_diffusers(make: Any, shift: float, steps: int) -> None:
    assert_as_close(make, steps, shift=shift)


@kinds
@shifts
def test_over_all_schedules_no_rounding_is_added_to_that_of_diffusers(make: Any, shift: float) -> None:
    squares = np.zeros(2)
    for steps in STEPS:
        exact = theirs(make(shift), steps, start().double())
        results = ours(make(1.0), steps, start(), shift=shift), theirs(make(shift), steps, start())
        squares += [float((result - exact).square().mean()) for result in results]
    assert squares[0] <= squares[1]


@kinds
@pytest.mark.parametrize("num_trained", [1000, 700])
def test_sigmas_and_timesteps_are_those_of_diffusers(make: Any, num_trained: int) -> None:
    for shift in (0.5, *SHIFTS, 12.0):
        for steps in range(1, 51):
            scheduler = make(shift, num_train_timesteps=num_trained)
            scheduler.set_timesteps(steps)
            levels = noise_levels(sampler_settings(config_of(scheduler)), flow_shift=shift, steps=steps)
            assert torch.equal(torch.from_numpy(levels.sigmas), scheduler.sigmas)
            timesteps = torch.from_numpy(levels.timesteps)
            assert timesteps.dtype == scheduler.timesteps.dtype
            assert torch.equal(timesteps, scheduler.timesteps)


@pytest.mark.parametrize(
    "settings",
    [
        {"solver_order": 1},
        {"solver_order": 3},
        {"disable_corrector": [0, 2]},
        {"solver_order": 3, "disable_corrector": [1, 3, 4]},
        {"num_train_timesteps": 700},
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 9])
def test_other_settings_of_unipc_are_the_formulas_of_diffusers(settings: Any, steps: int) -> None:
    exact = theirs(unipc(3.0, **settings), steps, start().double())
    result = ours(unipc(3.0, **settings), steps, start().double(), shift=3.0)
    assert (result - exact).abs().max() < 1e-13


@kinds
def test_one_step_goes_all_the_way_along_the_first_velocity(make: Any) -> None:
    stepper = Stepper(config_of(make(5.0)), flow_shift=5.0, steps=1, device="cpu")
    (timestep,) = stepper.timesteps.tolist()
    assert timestep >= 999
    direction = velocity(start(), timestep)
    clean = stepper.step(direction, index=0, latents_BCTHW=start())
    assert (clean - (start() - direction)).abs().max() < 1e-5


@pytest.mark.parametrize("steps", [3, 5, 8, 40])
@pytest.mark.parametrize("shift", [3.0, 12.0])
def test_history_crosses_from_one_expert_to_the_other(steps: int, shift: float) -> None:
    stepper = Stepper(config_of(unipc(shift)), flow_shift=shift, steps=steps, device="cpu")
    schedule = make_schedule(
        stepper.timesteps, boundary_timestep=875.0, guidance_scale=4.0, guidance_scale_2=3.0
    )
    assert {step.expert for step in schedule} == {0, 1}
    assert [step.index for step in schedule] == list(range(steps))

    def predict(latents: torch.Tensor, timestep: float) -> torch.Tensor:
        return velocity(latents, timestep) if timestep >= 875 else 0.5 - velocity(latents.flip(1), timestep)

    assert_as_close(unipc, steps, shift=shift, predict=predict)


@kinds
def test_gradients_run_through_all_steps(make: Any) -> None:
    """On sequences of tokens, as distillation has them."""

    def gradient(rollout: Callable[[torch.Tensor, Velocity], torch.Tensor]) -> torch.Tensor:
        strength = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
        latents = start((2, 6, 5)).double()
        clean = rollout(latents, lambda x, timestep: strength * velocity(x, timestep))
        return torch.autograd.grad(clean.square().mean(), strength)[0]

    mine = gradient(lambda x, predict: ours(make(3.0), 4, x, shift=3.0, predict=predict))
    reference = gradient(lambda x, predict: theirs(make(3.0), 4, x, predict=predict))
    assert reference.abs() > 0.1
    assert (mine - reference).abs() < 1e-12


@kinds
def test_no_step_reads_a_number_back_from_its_device(make: Any) -> None:
    stepper = Stepper(config_of(make(3.0)), flow_shift=3.0, steps=6, device="cpu")
    with FakeTensorMode():  # has no numbers: whatever asks for one raises
        latents = torch.empty(SHAPE)
        for index in range(6):
            latents = stepper.step(torch.empty(SHAPE), index=index, latents_BCTHW=latents)
    assert latents.shape == SHAPE


@kinds
def test_a_step_changes_neither_latents_nor_velocity(make: Any) -> None:
    stepper = Stepper(config_of(make(3.0)), flow_shift=3.0, steps=4, device="cpu")
    latents, results = start(), []
    for index in range(4):
        before, direction = latents.clone(), velocity(latents, 500.0)
        kept = direction.clone()
        result = stepper.step(direction, index=index, latents_BCTHW=latents)
        assert torch.equal(latents, before)
        assert torch.equal(direction, kept)
        direction.fill_(torch.nan)  # a recorded forward writes its next velocity there
        results.append((result, result.clone()))
        latents = result
    assert all(torch.equal(result, kept) for result, kept in results)
    assert latents.isfinite().all()


@kinds
def test_a_clip_does_not_depend_on_its_place_in_the_batch(make: Any) -> None:
    def no_neighbours(latents: torch.Tensor, timestep: float) -> torch.Tensor:
        return (latents + timestep / 1000).clamp(-1, 1)

    batch = start((5, 3, 3, 5, 7))
    together = ours(make(5.0), 9, batch, shift=5.0, predict=no_neighbours)
    for latents, result in zip(batch, together, strict=True):
        alone = ours(make(5.0), 9, latents[None].clone(), shift=5.0, predict=no_neighbours)
        assert torch.equal(alone[0], result)


def test_a_step_is_taken_once_and_in_order() -> None:
    stepper = Stepper(config_of(unipc(3.0)), flow_shift=3.0, steps=4, device="cpu")
    with pytest.raises(AssertionError):
        stepper.step(start(), index=1, latents_BCTHW=start())
    stepper.step(start(), index=0, latents_BCTHW=start())
    with pytest.raises(AssertionError):
        stepper.step(start(), index=0, latents_BCTHW=start())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"_class_name": "DDIMScheduler"}, "_class_name of the checkpoint's scheduler is 'DDIMScheduler'"),
        ({"prediction_type": "epsilon"}, "prediction_type .* is 'epsilon', not 'flow_prediction'"),
        ({"use_flow_sigmas": False}, "use_flow_sigmas .* is False, not True"),
        ({"predict_x0": False}, "predict_x0"),
        ({"solver_type": "bh1"}, "solver_type .* is 'bh1', not 'bh2'"),
        ({"lower_order_final": False}, "lower_order_final"),
        ({"final_sigmas_type": "sigma_min"}, "final_sigmas_type"),
        ({"solver_order": 0}, "solver_order .* is 0, not a whole number of at least 1"),
        ({"solver_order": True}, "solver_order"),
        ({"disable_corrector": 3}, "disable_corrector .* is 3, not a list of step numbers"),
        ({"num_train_timesteps": "1000"}, "num_train_timesteps"),
        ({"thresholding": True}, "thresholding .* is True, not off"),
        ({"solver_p": {"_class_name": "DDIMScheduler"}}, "solver_p"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas"),
        ({"use_beta_sigmas": True}, "use_beta_sigmas"),
        ({"use_exponential_sigmas": True}, "use_exponential_sigmas"),
        ({"use_dynamic_shifting": True}, "use_dynamic_shifting"),
        ({"shift_terminal": 0.1}, "shift_terminal"),
    ],
    ids=str,
)
def test_another_sampler_is_refused_by_name_and_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        Stepper(config_of(unipc(3.0)) | settings, flow_shift=3.0, steps=4, device="cpu")
    assert caught.value.hint


@pytest.mark.parametrize("setting", ["stochastic_sampling", "invert_sigmas", "shift_terminal"])
def test_another_kind_of_euler_is_refused(setting: str) -> None:
    with pytest.raises(ModelError, match=setting):
        Stepper(config_of(euler(3.0)) | {setting: True}, flow_shift=3.0, steps=4, device="cpu")


def test_settings_that_are_left_out_are_those_of_diffusers() -> None:
    filled = sampler_settings({"_class_name": "UniPCMultistepScheduler", **WAN})
    own = config_of(UniPCMultistepScheduler(**WAN))
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in filled.items()} == {
        key: own[key] for key in filled
    }
    with pytest.raises(ModelError, match="prediction_type"):  # their default is another sampler
        sampler_settings({"_class_name": "UniPCMultistepScheduler"})


@kinds
def test_a_shift_that_leaves_no_levels_apart_is_an_error_of_the_job(make: Any) -> None:
    with pytest.raises(RenderError, match=r"40 steps have no 40 different noise levels .*: 1e\+09"):
        Stepper(config_of(make(3.0)), flow_shift=1e9, steps=40, device="cpu")


@pytest.mark.parametrize("flow_shift", [LEAST_FLOW_SHIFT, MOST_FLOW_SHIFT])
@pytest.mark.parametrize("steps", [1, 2, 3, 20, 1000])
def test_every_flow_shift_that_a_row_may_ask_for_has_as_many_noise_levels_as_steps(
    flow_shift: float, steps: int
) -> None:
    unipc, euler = (
        noise_levels(sampler_settings({"_class_name": name, **config}), flow_shift=flow_shift, steps=steps)
        for name, config in (("UniPCMultistepScheduler", WAN), ("FlowMatchEulerDiscreteScheduler", {}))
    )
    assert len(unipc.sigmas) == len(euler.sigmas) == steps + 1
    for update in unipc_updates(unipc.sigmas, order=3, disable_corrector=()):
        assert np.isfinite([update.width, *update.earlier_weights]).all()
