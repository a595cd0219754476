"""UniPC's steps as weights, worked out once for a schedule, in fp64. No torch here.

Zhao et al. 2023, "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models", in
its variant bh2, for flow models: alpha = 1 - sigma, and a velocity v predicts clean latents m = x - sigma v.

The predictor of order p takes the latents at one level to the next, by its own m and the p - 1 before it.
Once m is known there, the corrector repeats that step with it. Both scale the latents they start from alike,
so that a correction is a sum of predictions, and goes into the next predictor: no corrected latents are made.
And as all weights of a step add up to one, what remains is Euler's step and the differences between the
latest prediction and those before it: small numbers, which cost little rounding when they are added first.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Update:
    """The next latents: latents + width x velocity, and for each prediction of the steps before, newest
    first, its weight x (that prediction - this step's). This step's: latents - sigma x velocity."""

    sigma: float
    width: float
    earlier_weights: tuple[float, ...] = ()


def unipc_updates(
    levels: npt.NDArray[np.float32], *, order: int, disable_corrector: Collection[int]
) -> tuple[Update, ...]:
    """One Update for each step. levels: sigmas, strictly falling from below 1 to 0.

    order: it rises from 1 at the start, and falls to 1 at the end. disable_corrector: steps whose result
    stays as it was predicted.
    """
    sigmas = levels.astype(np.float64)
    steps = len(sigmas) - 1
    orders = [min(order, index + 1, steps - index) for index in range(steps)]
    return tuple(
        Update(
            sigma=float(sigmas[index]),
            width=float(sigmas[index + 1] - sigmas[index]),
            earlier_weights=_earlier_weights(
                sigmas, orders, index, corrects=index > 0 and index - 1 not in disable_corrector
            ),
        )
        for index in range(steps)
    )


def _earlier_weights(sigmas: _Numbers, orders: list[int], index: int, *, corrects: bool) -> tuple[float, ...]:
    """Of every m but this step's, newest first, in the predictor and in the correction before it."""
    weights = _padded(_predictor(sigmas, index, orders[index]), max(orders) + 1)
    if corrects:
        predicted = [0.0, *_predictor(sigmas, index - 1, orders[index - 1])]
        correction = np.subtract(_corrector(sigmas, index - 1, orders[index - 1]), predicted)
        weights += sigmas[index + 1] / sigmas[index] * _padded(correction, len(weights))
    return tuple(np.trim_zeros(weights[1:], "b").tolist())


def _predictor(sigmas: _Numbers, start: int, order: int) -> list[float]:
    """Weights of m at `start` and at the levels before it, in the step to the next level."""
    own, earlier = _weights(sigmas, start, _nodes(sigmas, start, order))
    return [own, *earlier]


def _corrector(sigmas: _Numbers, start: int, order: int) -> list[float]:
    """The same, with the weight of m at the next level before them."""
    own, (*earlier, ahead) = _weights(sigmas, start, [*_nodes(sigmas, start, order), 1.0])
    return [ahead, own, *earlier]


def _nodes(sigmas: _Numbers, start: int, order: int) -> list[float]:
    """Where the order - 1 levels before `start` lie, in units of the step from it: the paper's r."""
    ratios = _log_ratio(sigmas[start - order + 1 : start + 1])[::-1]
    return list((ratios[1:] - ratios[0]) / _width(sigmas, start))


def _weights(sigmas: _Numbers, start: int, nodes: list[float]) -> tuple[float, list[float]]:
    """Of m at `start`, and of m at each node."""
    whole = (sigmas[start + 1] - 1) * np.expm1(-_width(sigmas, start))
    at_nodes = [whole * rho / node for rho, node in zip(_rhos(sigmas, start, nodes), nodes, strict=True)]
    return whole - sum(at_nodes), at_nodes


def _rhos(sigmas: _Numbers, start: int, nodes: list[float]) -> _Numbers:
    """The shares of the differences from m at `start`, such that polynomials come out exactly."""
    if len(nodes) < 2:
        return np.full(len(nodes), 0.5)  # the paper's choice, close to what the equations give
    step = -_width(sigmas, start)
    phi, factorial, moments = np.expm1(step) / step - 1, 1, []
    for power in range(2, len(nodes) + 2):
        moments.append(phi * factorial / np.expm1(step))
        factorial *= power
        phi = phi / step - 1 / factorial
    return np.linalg.solve(np.vander(nodes, increasing=True).T, np.array(moments))


def _width(sigmas: _Numbers, start: int) -> float:
    here, ahead = _log_ratio(sigmas[start : start + 2])
    return ahead - here


def _log_ratio(sigmas: _Numbers) -> _Numbers:
    """lambda = log(alpha / sigma), infinite where there is no noise."""
    with np.errstate(divide="ignore"):
        return np.log1p(-sigmas) - np.log(sigmas)


def _padded(weights: npt.ArrayLike, length: int) -> _Numbers:
    padded = np.zeros(length)
    padded[: np.size(weights)] = weights
    return padded
