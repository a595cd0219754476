"""Noise levels and timesteps of the samplers that Wan checkpoints name, as in diffusers. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from manifests.errors import ModelError, RenderError

UNIPC = "UniPCMultistepScheduler"
EULER = "FlowMatchEulerDiscreteScheduler"

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    UNIPC: {
        "num_train_timesteps": 1000,
        "solver_order": 2,
        "disable_corrector": (),
        "prediction_type": "epsilon",
        "use_flow_sigmas": False,
        "predict_x0": True,
        "solver_type": "bh2",
        "lower_order_final": True,
        "final_sigmas_type": "zero",
    },
    EULER: {"num_train_timesteps": 1000},
}
# At a last sigma of zero diffusers itself divides by zero with `bh1`, or without a lower order at the end.
_NEEDED = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "predict_x0": True,
    "solver_type": "bh2",
    "lower_order_final": True,
    "final_sigmas_type": "zero",
}
# Each makes another sampler of one of the two.
_OFF = (
    "invert_sigmas",
    "shift_terminal",
    "solver_p",
    "stochastic_sampling",
    "thresholding",
    "use_beta_sigmas",
    "use_dynamic_shifting",
    "use_exponential_sigmas",
    "use_karras_sigmas",
)
_BELOW_ONE = 1e-6  # UniPC takes the logarithm of 1 - sigma


@dataclass(frozen=True, kw_only=True)
class NoiseLevels:
    """sigmas: strictly falling, one for each step, then 0. timesteps: what the model is told at each step,
    whole numbers for UniPC, as diffusers truncates them."""

    sigmas: npt.NDArray[np.float32]
    timesteps: npt.NDArray[np.int64] | npt.NDArray[np.float32]


def sampler_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler_config.json with diffusers' defaults filled in. Raises ModelError for what is not ours.

    Wan's samplers: UniPC for flow prediction, of any order, and Euler, down to no noise at all.
    """
    name = str(config.get("_class_name"))
    if name not in _DEFAULTS:
        raise _refused("_class_name", name, " or ".join(_DEFAULTS))
    settings = {**_DEFAULTS[name], **config}
    for key in _OFF:
        if settings.get(key):
            raise _refused(key, settings[key], "off")
    _check_counts(settings)
    for key, needed in _NEEDED.items() if name == UNIPC else ():
        if settings[key] != needed:
            raise _refused(key, settings[key], repr(needed))
    return settings


def _check_counts(settings: Mapping[str, Any]) -> None:
    for key in ("num_train_timesteps", "solver_order"):
        value = settings.get(key, 1)
        if type(value) is not int or value < 1:
            raise _refused(key, value, "a whole number of at least 1")
    disabled = settings.get("disable_corrector", ())
    if not (isinstance(disabled, list | tuple) and all(type(index) is int for index in disabled)):
        raise _refused("disable_corrector", disabled, "a list of step numbers")


def _refused(key: str, value: Any, valid: str) -> ModelError:
    return ModelError(
        f"{key} of the checkpoint's scheduler is {value!r}, not {valid}",
        hint="use the scheduler_config.json that the model was published with",
    )


def noise_levels(settings: Mapping[str, Any], *, flow_shift: float, steps: int) -> NoiseLevels:
    """Of `sampler_settings`. Raises RenderError for a shift so extreme that levels coincide in fp32."""
    levels = _unipc_levels if settings["_class_name"] == UNIPC else _euler_levels
    with np.errstate(all="ignore"):
        exact, timesteps = levels(settings["num_train_timesteps"], flow_shift, steps)
        sigmas = np.append(exact.astype(np.float32), np.float32(0))
    if not (np.diff(sigmas) < 0).all():  # what is not a number does not fall either
        raise RenderError(
            f"{steps} steps have no {steps} different noise levels at this flow_shift: {flow_shift:g}",
            hint="published models use 3 to 12",
        )
    return NoiseLevels(sigmas=sigmas, timesteps=timesteps)


def _unipc_levels(num_trained: int, flow_shift: float, steps: int) -> tuple[npt.NDArray, npt.NDArray]:
    sigmas = _shifted(np.linspace(1, 1 / num_trained, steps + 1)[:-1], flow_shift)
    if abs(sigmas[0] - 1) < _BELOW_ONE:
        sigmas[0] -= _BELOW_ONE
    return sigmas, (sigmas * num_trained).astype(np.int64)


def _euler_levels(num_trained: int, flow_shift: float, steps: int) -> tuple[npt.NDArray, npt.NDArray]:
    # The ends are shifted in fp32, then everything from end to end in fp64: the ends twice, as in diffusers.
    first, last = _shifted(np.array([num_trained, 1], np.float32) / num_trained, flow_shift).tolist()
    evenly = np.linspace(first * num_trained, last * num_trained, steps) / num_trained
    sigmas = _shifted(evenly, flow_shift)
    return sigmas, sigmas.astype(np.float32) * np.float32(num_trained)


def _shifted(sigmas: npt.NDArray, flow_shift: float) -> npt.NDArray:
    """The timestep shift of Esser et al. 2024, in the array's own dtype."""
    return flow_shift * sigmas / (1 + (flow_shift - 1) * sigmas)
