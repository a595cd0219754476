"""Each op against the same formula in float64, and against plain torch at the same dtype.

The bound: an error of at most twice plain torch's at that dtype, plus 1e-6. Odd sizes are in the grid.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from pipeline.kernels.affine_norm import affine_norm
from pipeline.kernels.attention import attention
from pipeline.kernels.gated_residual import gated_residual
from pipeline.kernels.gelu import gelu
from pipeline.kernels.qk_norm_rope import qk_norm, qk_norm_rope

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 1, 2), (2, 7, 24), (3, 33, 48))  # clips, tokens, channels; 2 heads where there are heads
EPS = 1e-6


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    return request.param


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_close(
    ours: torch.Tensor, plain: Callable[..., torch.Tensor], *inputs: torch.Tensor, dtype: torch.dtype
) -> None:
    """plain: the formula in torch, run at float64 for the truth and at dtype for the yardstick."""
    assert ours.dtype == dtype
    truth = plain(*(tensor.double() for tensor in inputs))
    yardstick = plain(*(tensor.to(dtype) for tensor in inputs))
    error, allowed = (ours - truth).abs().max(), (yardstick - truth).abs().max()
    assert ours.shape == truth.shape
    assert error <= 2 * allowed + 1e-6


def test_affine_norm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = rand(*shape, seed=1, dtype=dtype)
    weight, bias = rand(shape[0], 1, shape[2], seed=2), rand(1, 1, shape[2], seed=3)
    ours = affine_norm(x, weight=weight, bias=bias, eps=EPS)
    assert_close(
        ours, lambda x, w, b: F.layer_norm(x, x.shape[-1:], eps=EPS) * w + b, x, weight, bias, dtype=dtype
    )


def test_affine_norm_of_a_constant_row_is_its_bias(dtype: torch.dtype) -> None:
    ours = affine_norm(
        torch.full((1, 2, 8), 300.0, dtype=dtype), weight=torch.ones(8), bias=torch.full((8,), 0.5), eps=EPS
    )
    assert torch.equal(ours, torch.full((1, 2, 8), 0.5, dtype=dtype))


def test_gated_residual(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, branch = rand(*shape, seed=1, dtype=dtype), rand(*shape, seed=2, dtype=dtype)
    gate = rand(1, 1, shape[2], seed=3)
    ours = gated_residual(x, branch, gate=gate)
    assert_close(ours, lambda x, branch, gate: x + branch * gate, x, branch, gate, dtype=dtype)


def test_gelu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    def formula(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))

    x = rand(*shape, seed=1, dtype=dtype)
    assert_close(gelu(x), formula, x, dtype=dtype)


def rms_normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def test_qk_norm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight = rand(*shape, seed=1, dtype=dtype), rand(shape[2], seed=2, dtype=dtype)
    ours = qk_norm(x, weight=weight, eps=EPS, num_heads=2)
    assert ours.shape == (*shape[:2], 2, shape[2] // 2)
    assert_close(ours.flatten(2), rms_normed, x, weight, dtype=dtype)


@pytest.mark.parametrize("shape", [(1, 1, 4), (2, 7, 24), (3, 33, 48)], ids=str)
def test_qk_norm_rope_turns_each_pair_by_its_tokens_angle(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    def formula(x: torch.Tensor, weight: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        pairs = rms_normed(x, weight).unflatten(-1, (2, -1, 2))
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = pairs.unbind(-1)
        turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
        return turned.flatten(-2)

    x, weight = rand(*shape, seed=1, dtype=dtype), rand(shape[2], seed=2, dtype=dtype)
    angle = rand(shape[1], shape[2] // 4, seed=3)
    rope = (angle.cos()[:, None], angle.sin()[:, None])
    ours = qk_norm_rope(x, weight=weight, eps=EPS, num_heads=2, rope=rope)
    assert_close(ours, formula, x, weight, angle, dtype=dtype)


def test_rotation_by_nothing_is_the_plain_norm(dtype: torch.dtype) -> None:
    x, weight = rand(2, 5, 24, seed=1, dtype=dtype), rand(24, seed=2, dtype=dtype)
    still = (torch.ones(5, 1, 6), torch.zeros(5, 1, 6))
    rotated = qk_norm_rope(x, weight=weight, eps=EPS, num_heads=2, rope=still)
    assert torch.equal(rotated, qk_norm(x, weight=weight, eps=EPS, num_heads=2))


@pytest.mark.parametrize("num_keys", [1, 9, 40])
def test_attention(num_keys: int, dtype: torch.dtype) -> None:
    def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bnhk,bmhk->bhnm", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("bhnm,bmhk->bnhk", scores.softmax(-1), v).flatten(2)

    q, k, v = (rand(2, n, 3, 8, seed=n, dtype=dtype) for n in (7, num_keys, num_keys))
    assert_close(attention(q, k, v), formula, q, k, v, dtype=dtype)
