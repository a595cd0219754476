"""The ops between the decoder's convolutions: kernels on a card or in Triton's interpreter, and on the CPU.

The interpreter's bf16 is wrong, so without a card kernels run in fp32 alone. Odd sizes are in the grid.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_wan import DupUp3D

from pipeline.kernels.rms_silu import fused_rms_silu, rms_norm, triton_rms_silu
from pipeline.kernels.upsample_rms_silu import fused_upsample_rms_silu, triton_upsample_rms_silu
from tests.pipeline_ops import assert_close, rand

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
HALF_AND_FULL = (torch.bfloat16, torch.float32)
# The op itself on the CPU; its kernel wherever kernels run.
ROUTES = [("op", "cpu", dtype) for dtype in HALF_AND_FULL]
if find_spec("triton"):
    ROUTES += [("kernel", DEVICE, dtype) for dtype in (HALF_AND_FULL if CARD else (torch.float32,))]

SHAPES = [(1, 1, 1, 1), (1, 3, 5, 7), (2, 5, 3, 33), (5, 3, 2, 96), (3, 1, 2, 512)]  # frames, sides, channels
# Frames, sides before doubling and channels of the result; channels of the shortcut, how many frames come
# from one of its own, and which of those is the first.
UPSAMPLINGS = [
    ((1, 1, 1, 1), (1, 1, 0)),
    ((1, 3, 5, 7), (7, 2, 1)),
    ((2, 3, 2, 7), (7, 2, 0)),
    ((4, 2, 3, 12), (12, 2, 2)),
    ((3, 3, 2, 33), (66, 1, 0)),
    ((4, 3, 2, 7), (14, 2, 1)),
    ((3, 2, 1, 6), (12, 1, 2)),
    ((2, 1, 3, 256), (512, 1, 0)),
    ((5, 3, 2, 33), None),
    ((1, 2, 3, 96), None),
]


class Route:
    def __init__(self, kind: str, device: str, dtype: torch.dtype) -> None:
        self.is_op = kind == "op"
        self.device = device
        self.dtype = dtype

    def rand(self, *shape: int, seed: int) -> torch.Tensor:
        return rand(*shape, seed=seed, dtype=self.dtype, device=self.device)

    def unwritten(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)


@pytest.fixture(params=ROUTES, ids=lambda route: " ".join(map(str, route)))
def route(request: pytest.FixtureRequest) -> Route:
    return Route(*request.param)


def normed_silu(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """As diffusers has it, over the last axis."""
    return F.silu(F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * gamma)


def test_the_norm_is_diffusers(route: Route) -> None:
    x, gamma = route.rand(2, 3, 5, 33, seed=1), route.rand(33, seed=2)

    def formula(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1) * 33**0.5 * gamma

    assert_close(rms_norm(x, gamma), formula, x, gamma, dtype=route.dtype)


@pytest.mark.parametrize("keep_sum", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_silu(route: Route, shape: tuple[int, ...], has_residual: bool, keep_sum: bool) -> None:
    num_frames, *sides, channels = shape
    branch, bias, gamma = (
        route.rand(*shape, seed=1),
        route.rand(channels, seed=2),
        route.rand(channels, seed=3),
    )
    residual = route.rand(*shape, seed=4) if has_residual else None
    history = route.rand(2, *sides, channels, seed=5)
    window = route.unwritten(num_frames + 2, *sides, channels)
    given, given_history = branch.clone(), history.clone()
    parts = [given, bias] + ([residual] if residual is not None else [])
    if route.is_op:
        fused_rms_silu(
            branch,
            bias=bias,
            residual=residual,
            gamma=gamma,
            window=window,
            history=history,
            keep_sum=keep_sum,
        )
    else:
        triton_rms_silu(branch, bias, residual, gamma, window, history, keep_sum)

    def formula(gamma: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        return normed_silu(sum(parts[1:], parts[0]), gamma)

    assert_close(window[2:], formula, gamma, *parts, dtype=route.dtype)
    assert torch.equal(window[:2], given_history)
    assert torch.equal(history, window[-2:])
    if keep_sum:
        assert_close(branch, lambda *parts: sum(parts[1:], parts[0]), *parts, dtype=route.dtype)
    else:
        assert torch.equal(branch, given)


def test_the_norm_of_zeros_is_zeros(route: Route) -> None:
    branch, bias, gamma = torch.zeros(3, 2, 1, 5), torch.zeros(5), torch.ones(5)
    window, history = torch.ones(5, 2, 1, 5), torch.zeros(2, 2, 1, 5)
    tensors = [tensor.to(route.device, route.dtype) for tensor in (branch, bias, gamma, window, history)]
    branch, bias, gamma, window, history = tensors
    if route.is_op:
        fused_rms_silu(branch, bias=bias, gamma=gamma, window=window, history=history, keep_sum=False)
    else:
        triton_rms_silu(branch, bias, None, gamma, window, history, False)
    assert torch.equal(window, torch.zeros_like(window))


def placed(quarters_THWQ: torch.Tensor) -> torch.Tensor:
    """Pixel by pixel."""
    num_frames, rows, columns, values = quarters_THWQ.shape
    channels = values // 4
    result = quarters_THWQ.new_empty(num_frames, 2 * rows - 2, 2 * columns - 2, channels)
    for row in range(2 * rows - 2):
        for column in range(2 * columns - 2):
            (y, a), (x, b) = divmod(row, 2), divmod(column, 2)
            start = (2 * a + b) * channels
            result[:, row, column] = quarters_THWQ[:, y + a, x + b, start : start + channels]
    return result


def duplicated(shortcut_THWC: torch.Tensor, *, channels: int, time_factor: int) -> torch.Tensor:
    """By diffusers' own module."""
    module = DupUp3D(shortcut_THWC.shape[-1], channels, factor_t=time_factor, factor_s=2)
    return module(shortcut_THWC.permute(3, 0, 1, 2)[None])[0].permute(1, 2, 3, 0)


@pytest.mark.parametrize(("shape", "repeats"), UPSAMPLINGS, ids=str)
def test_upsample_rms_silu(
    route: Route, shape: tuple[int, ...], repeats: tuple[int, int, int] | None
) -> None:
    num_frames, height, width, channels = shape
    sides = 2 * height, 2 * width
    quarters = route.rand(num_frames, height + 1, width + 1, 4 * channels, seed=1)
    bias, gamma = route.rand(channels, seed=2), route.rand(channels, seed=3)
    history = route.rand(2, *sides, channels, seed=5)
    sums, window = (route.unwritten(num_frames + more, *sides, channels) for more in (0, 2))
    given_history, shortcut = history.clone(), None
    shortcut_channels, time_factor, first_frame = repeats or (0, 1, 0)
    parts = [bias, quarters]
    if repeats:
        needed_frames = -(-(first_frame + num_frames) // time_factor)
        shortcut = route.rand(needed_frames, height, width, shortcut_channels, seed=4)
        parts.append(shortcut)
    if route.is_op:
        fused_upsample_rms_silu(
            quarters,
            bias=bias,
            shortcut=shortcut,
            gamma=gamma,
            sums=sums,
            window=window,
            history=history,
            first_frame=first_frame,
            time_factor=time_factor,
        )
    else:
        triton_upsample_rms_silu(
            quarters, bias, shortcut, gamma, sums, window, history, first_frame, time_factor
        )

    def summed(bias: torch.Tensor, quarters: torch.Tensor, *shortcut: torch.Tensor) -> torch.Tensor:
        result = placed(quarters) + bias
        for values in shortcut:
            frames = duplicated(values, channels=channels, time_factor=time_factor)
            result = result + frames[first_frame : first_frame + num_frames]
        return result

    def formula(gamma: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        return normed_silu(summed(*parts), gamma)

    assert_close(sums, summed, *parts, dtype=route.dtype)
    assert_close(window[2:], formula, gamma, *parts, dtype=route.dtype)
    assert torch.equal(window[:2], given_history)
    assert torch.equal(history, window[-2:])


def op_calls() -> dict[str, tuple[Any, ...]]:
    """Arguments for each registered op."""
    vector = rand(6, seed=1, device=DEVICE)
    frames, residual, window, history, quarters, shortcut, sums = (
        rand(*shape, seed=seed, device=DEVICE)
        for seed, shape in enumerate(
            [
                (3, 4, 2, 6),
                (3, 4, 2, 6),
                (5, 4, 2, 6),
                (2, 4, 2, 6),
                (3, 3, 2, 24),
                (2, 2, 1, 6),
                (3, 4, 2, 6),
            ]
        )
    )
    return {
        "rms_silu": (frames, vector, residual, vector, window, history, True),
        "upsample_rms_silu": (quarters, vector, shortcut, vector, sums, window, history, 1, 2),
    }


@pytest.mark.parametrize("name", ["rms_silu", "upsample_rms_silu"])
def test_what_an_op_says_of_itself_is_true(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.vgbatch, name).default, op_calls()[name])
