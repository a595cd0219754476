"""Plain torch of each op against the same formula in float64. Odd sizes are in the grid."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pipeline.kernels.affine_norm import affine_norm
from pipeline.kernels.attention import TORCH, attention
from pipeline.kernels.gated_residual import gated_residual
from pipeline.kernels.gelu import gelu
from pipeline.kernels.qk_norm_rope import qk_norm, qk_norm_rope
from tests.pipeline_ops import EPS, assert_close, rand, rms_normed, rotated, tanh_gelu

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 1, 2), (2, 7, 24), (3, 33, 48))  # clips, tokens, channels; 2 heads where there are heads


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    return request.param


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
    x = rand(*shape, seed=1, dtype=dtype)
    assert_close(gelu(x), tanh_gelu, x, dtype=dtype)


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
        return rotated(rms_normed(x, weight).unflatten(-1, (2, -1)), angle)

    x, weight = rand(*shape, seed=1, dtype=dtype), rand(shape[2], seed=2, dtype=dtype)
    angle = rand(shape[1], shape[2] // 4, seed=3)
    rope = (angle.cos()[:, None], angle.sin()[:, None])
    ours = qk_norm_rope(x, weight=weight, eps=EPS, num_heads=2, rope=rope)
    assert_close(ours, formula, x, weight, angle, dtype=dtype)


def test_plain_ops_have_a_gradient() -> None:
    x = rand(1, 3, 8, seed=1).requires_grad_()
    weight = torch.ones(8)
    rope = (torch.ones(3, 1, 2), torch.zeros(3, 1, 2))
    results = (
        affine_norm(x, weight=weight, bias=weight, eps=EPS),
        gated_residual(x, x, gate=weight),
        gelu(x),
        qk_norm(x, weight=weight, eps=EPS, num_heads=2),
        qk_norm_rope(x, weight=weight, eps=EPS, num_heads=2, rope=rope),
    )
    for result in results:
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
        assert gradient.abs().sum() > 0


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
    assert_close(attention(q, k, v, backend=TORCH), formula, q, k, v, dtype=dtype)
