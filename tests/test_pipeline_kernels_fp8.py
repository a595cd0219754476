"""8-bit ops: what is rounded against float64, how it is rounded, and what comes of it.

Triton's interpreter rounds to e4m3 wrongly, so there kernels store what they would round; a card does both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipeline.kernels import fp8_qkv as fp8_qkv_file
from pipeline.kernels import fp8_rows as fp8_rows_file
from pipeline.kernels.affine_norm_fp8 import affine_norm_fp8, triton_affine_norm_fp8
from pipeline.kernels.fp8_attention import fp8_attention, plain_fp8_attention
from pipeline.kernels.fp8_linear import fp8_linear, fp8_weight
from pipeline.kernels.fp8_qkv import fp8_norms, fp8_qkv, triton_fp8_qkv
from pipeline.kernels.fp8_rows import LARGEST, Fp8Rows, fp8_rows, to_e4m3, triton_fp8_rows
from pipeline.kernels.gated_residual import gated_residual
from pipeline.kernels.gated_residual_norm_fp8 import gated_residual_norm_fp8, triton_gated_residual_norm_fp8
from pipeline.kernels.gelu_fp8 import gelu_fp8, triton_gelu_fp8
from tests.pipeline_ops import EPS, rand, rms_normed, rotated, tanh_gelu
from tests.test_pipeline_kernels_triton import CARD, DEVICE, ROUTES, WAYS, Route, layer_normed

pytestmark = pytest.mark.usefixtures("interpreter_loops")

SHAPES = ((1, 1, 48), (3, 33, 96), (2, 7, 1536), (1, 7, 3072))  # clips, tokens, channels
HEADS = (
    (1, 1, 2, 16),
    (3, 33, 5, 16),
    (2, 70, 3, 64),
    (1, 7, 24, 128),
)  # clips, tokens, heads, channels of one
HALF_STEP, LEAST_STEP = 2.0**-4, 2.0**-9  # of e4m3: relative, and below its normal numbers
EIGHT_BIT_ROUTES = [route for route in ROUTES if route[0] == "op" or CARD]


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ops store fp32 in place of e4m3."""
    monkeypatch.setattr(fp8_rows_file, "E4M3", torch.float32)


def each_route(routes: list[tuple[str, str, torch.dtype]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "route", [Route(*route) for route in routes], ids=[" ".join(map(str, route)) for route in routes]
    )


Op = Callable[[Route, tuple[int, int, int]], tuple[Fp8Rows, torch.Tensor]]


def rows_alone(route: Route, shape: tuple[int, int, int]) -> tuple[Fp8Rows, torch.Tensor]:
    x = route.rand(*shape, seed=1)
    return Fp8Rows(*(fp8_rows(x) if route.is_op else triton_fp8_rows(x, None, None))), x.double()


def rows_scaled_and_shifted(route: Route, shape: tuple[int, int, int]) -> tuple[Fp8Rows, torch.Tensor]:
    clips, _, channels = shape
    x = route.rand(*shape, seed=1)
    weight, bias = route.fp32(clips, 2, channels, seed=2).chunk(2, dim=1)
    rows = fp8_rows(x, weight=weight, bias=bias) if route.is_op else triton_fp8_rows(x, weight, bias)
    return Fp8Rows(*rows), x.double() * weight.double() + bias.double()


def normed_rows(route: Route, shape: tuple[int, int, int]) -> tuple[Fp8Rows, torch.Tensor]:
    clips, _, channels = shape
    x = route.rand(*shape, seed=1)
    bias, weight = route.fp32(clips, 6, channels, seed=2).chunk(6, dim=1)[3:5]
    op = affine_norm_fp8(x, weight=weight, bias=bias, eps=EPS) if route.is_op else None
    rows = op or Fp8Rows(*triton_affine_norm_fp8(x, weight, bias, EPS))
    return rows, layer_normed(x.double(), weight.double(), bias.double())


def normed_sums(route: Route, shape: tuple[int, int, int]) -> tuple[Fp8Rows, torch.Tensor]:
    clips, _, channels = shape
    x, branch = route.rand(*shape, seed=1), route.rand(*shape, seed=2)
    gate = route.fp32(clips, 6, channels, seed=3)[:, 2:3]
    weight, bias = route.fp32(channels, seed=4), route.fp32(clips, 1, channels, seed=5)
    summed = gated_residual(x, branch, gate=gate)
    if route.is_op:
        rows = gated_residual_norm_fp8(x, branch, gate=gate, weight=weight, bias=bias, eps=EPS)
    else:
        rows = Fp8Rows(*triton_gated_residual_norm_fp8(x, branch, gate, weight, bias, EPS))
    assert torch.equal(x, summed)
    return rows, layer_normed(x.double(), weight.double(), bias.double())


def normed_sums_without_a_gate(route: Route, shape: tuple[int, int, int]) -> tuple[Fp8Rows, torch.Tensor]:
    x, branch = route.rand(*shape, seed=1), route.rand(*shape, seed=2)
    weight, bias = route.fp32(shape[2], seed=4), route.fp32(shape[2], seed=5)
    summed = x + branch
    if route.is_op:
        rows = gated_residual_norm_fp8(x, branch, gate=None, weight=weight, bias=bias, eps=EPS)
    else:
        rows = Fp8Rows(*triton_gated_residual_norm_fp8(x, branch, None, weight, bias, EPS))
    assert torch.equal(x, summed)
    return rows, layer_normed(x.double(), weight.double(), bias.double())


def activated_rows(route: Route, shape: tuple[int, int, int]) -> tuple[Fp8Rows, torch.Tensor]:
    x = route.rand(*shape, seed=1)
    rows = gelu_fp8(x) if route.is_op else Fp8Rows(*triton_gelu_fp8(x))
    return rows, tanh_gelu(x.double())


ROW_OPS: tuple[Op, ...] = (
    rows_alone,
    rows_scaled_and_shifted,
    normed_rows,
    normed_sums,
    normed_sums_without_a_gate,
    activated_rows,
)


@pytest.mark.usefixtures("unrounded")
@each_route(ROUTES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", ROW_OPS)
def test_rows_fill_the_range_and_their_scales_give_them_back(
    op: Op, shape: tuple[int, int, int], route: Route
) -> None:
    rows, truth = op(route, shape)
    largest = truth.abs().amax(-1, keepdim=True)
    assert rows.scales_BN1.shape == (*shape[:2], 1)
    torch.testing.assert_close(rows.scales_BN1.double(), largest / LARGEST, rtol=1e-5, atol=1e-30)
    error = (rows.values_BND.double() * rows.scales_BN1.double() - truth).abs()
    assert (error <= 1e-5 * largest).all()


@each_route(EIGHT_BIT_ROUTES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", ROW_OPS)
def test_rows_err_by_no_more_than_half_a_step_of_e4m3(
    op: Op, shape: tuple[int, int, int], route: Route
) -> None:
    rows, truth = op(route, shape)
    assert rows.values_BND.dtype == torch.float8_e4m3fn
    error = (rows.values_BND.double() * rows.scales_BN1.double() - truth).abs()
    assert (error <= HALF_STEP * truth.abs() + 1.001 * LEAST_STEP / 2 * rows.scales_BN1.double()).all()


@each_route(EIGHT_BIT_ROUTES)
def test_a_row_of_zeros_stays_one(route: Route) -> None:
    x = torch.zeros((1, 3, 48), dtype=route.dtype, device=route.device)
    values, scales = fp8_rows(x) if route.is_op else triton_fp8_rows(x, None, None)
    assert (values.float() == 0).all()
    assert scales.isfinite().all()
    assert (scales > 0).all()


def test_e4m3_is_the_nearest_and_of_two_the_even_one_and_no_larger_than_the_largest() -> None:
    codes = torch.arange(127, dtype=torch.uint8)  # 0 to 448: the last code is not a number
    grid = codes.view(torch.float8_e4m3fn).double()
    x = torch.cat([rand(1000, seed=1).double() * scale for scale in (0.001, 1, 100)])
    nearest = grid[(x.abs()[:, None] - grid).abs().argmin(1)] * x.sign()
    assert torch.equal(to_e4m3(x.float()).double(), nearest)
    middles = (grid[1:] + grid[:-1]) / 2
    even = torch.where(codes[1:] % 2 == 0, grid[1:], grid[:-1])
    assert torch.equal(to_e4m3(middles.float()).double(), even)
    assert to_e4m3(torch.tensor([460.0, -1e9])).tolist() == [448.0, -448.0]


@each_route(EIGHT_BIT_ROUTES)
def test_what_is_not_a_number_stays_none(route: Route) -> None:
    x = route.rand(1, 2, 48, seed=1)
    x[0, 1, 5] = torch.nan
    values, scales = fp8_rows(x) if route.is_op else triton_fp8_rows(x, None, None)
    back = values.float() * scales
    assert back[0, 1, 5].isnan()
    assert back[0, 0].isfinite().all()


def qkv_inputs(route: Route, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The projection, with something that all tokens have in common; norms' weights; angles."""
    clips, tokens, heads, head_channels = sizes
    channels = heads * head_channels
    common = 3 * route.rand(clips, 1, 3 * channels, seed=4)
    qkv = route.rand(clips, tokens, 3 * channels, seed=1) + common
    return qkv, route.rand(2, channels, seed=2), route.fp32(tokens, head_channels // 2, seed=3)


def run_fp8_qkv(
    route: Route, qkv: torch.Tensor, weights: torch.Tensor, angle: torch.Tensor, *, heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales and means of values."""
    rope = (angle.cos()[:, None], angle.sin()[:, None])
    norms = fp8_norms(*weights, num_heads=heads)
    if route.is_op:
        return fp8_qkv(qkv, weights_2D=norms.weights_2D, eps=EPS, num_heads=heads, rope=rope)
    values, affine = triton_fp8_qkv(qkv, norms.weights_2D, EPS, heads, *rope)
    return values, affine[:, :1], affine[:, 1:]


@pytest.mark.usefixtures("unrounded")
@each_route(ROUTES)
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_queries_keys_and_values_are_normed_turned_and_centred(sizes: tuple[int, ...], route: Route) -> None:
    _, tokens, heads, _ = sizes
    qkv, weights, angle = qkv_inputs(route, sizes)
    values, v_scales, v_means = run_fp8_qkv(route, qkv, weights, angle, heads=heads)
    q, k, v = (part.double() for part in values.chunk(3, dim=-1))

    def formula(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = rms_normed(x.double(), weight.double()).unflatten(-1, (heads, -1))
        return rotated(normed, angle.double())

    given_q, given_k, given_v = qkv.chunk(3, dim=-1)
    true_q, true_k = formula(given_q, weights[0]), formula(given_k, weights[1])
    true_k = true_k - true_k[:, :: fp8_qkv_file._KEY_STEP].mean(1, keepdim=True)
    q, k = (part.unflatten(-1, (heads, -1)) for part in (q, k))
    # Their scales are told apart by no result: scores have the product of both.
    scores = torch.einsum("bnhk,bmhk->bhnm", q, k)
    scores *= fp8_norms(*weights, num_heads=heads).score_scales_H.double()[:, None, None]
    true_scores = torch.einsum("bnhk,bmhk->bhnm", true_q, true_k)
    assert (scores - true_scores).abs().max() <= 1e-5 * (1 + true_scores.abs().max())

    centred = given_v.double() - given_v.double().mean(1, keepdim=True)
    assert (v * v_scales + v_means - given_v.double()).abs().max() <= 1e-5 * given_v.abs().max()
    assert (v * v_scales - centred).abs().max() <= 1e-5 * given_v.abs().max()
    if tokens > 1:
        torch.testing.assert_close(v.abs().amax(1), torch.full_like(v[:, 0], LARGEST), rtol=1e-4, atol=0)


@pytest.mark.usefixtures("unrounded")
@each_route(ROUTES)
def test_no_query_and_no_key_is_beyond_the_range_however_lopsided_it_is(route: Route) -> None:
    heads, head_channels, tokens = 3, 16, 40
    channels = heads * head_channels
    qkv = torch.zeros((1, tokens, 3 * channels), dtype=route.dtype, device=route.device)
    for token in range(tokens):  # all of a row in one pair of channels
        qkv[0, token, token % channels] = qkv[0, token, channels + token % channels] = 1000.0 * (-1) ** token
    weights = route.rand(2, channels, seed=2)
    angle = route.fp32(tokens, head_channels // 2, seed=3)
    values, _, _ = run_fp8_qkv(route, qkv, weights, angle, heads=heads)
    assert values.abs().max() <= LARGEST * (1 + 1e-5)
    assert (
        values[..., :channels].abs().max() >= LARGEST / 2
    )  # and the bound of queries is no larger than it must be


def attended(qkv: torch.Tensor, weights: torch.Tensor, angle: torch.Tensor, *, heads: int) -> torch.Tensor:
    """(B, N, D) by the ops, in fp32."""
    route = Route("op", str(qkv.device), qkv.dtype)
    values, v_scales, v_means = run_fp8_qkv(route, qkv, weights, angle, heads=heads)
    scales = fp8_norms(*weights, num_heads=heads).score_scales_H
    return fp8_attention(values, score_scales=scales).float() * v_scales + v_means


def exactly_attended(
    qkv: torch.Tensor, weights: torch.Tensor, angle: torch.Tensor, *, heads: int, eight_bit: bool
) -> torch.Tensor:
    """In float64. eight_bit: queries, keys and values are rounded to e4m3, scaled by their head's largest."""
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in qkv.double().chunk(3, dim=-1))
    q, k = (
        rotated(rms_normed(x.flatten(2), weight.double()).unflatten(-1, (heads, -1)), angle.double())
        for x, weight in zip((q, k), weights, strict=True)
    )
    if eight_bit:
        q, k, v = (rounded_by_head(x) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def rounded_by_head(x_BNHK: torch.Tensor) -> torch.Tensor:
    scales = x_BNHK.abs().amax((1, 3), keepdim=True) / LARGEST
    return (x_BNHK / scales).float().to(torch.float8_e4m3fn).double() * scales


@pytest.mark.parametrize("common", [0.0, 3.0])
def test_attention_errs_as_rounding_must_and_no_more_for_what_all_tokens_have_in_common(
    common: float,
) -> None:
    sizes = 2, 150, 3, 64
    route = Route("op", "cpu", torch.float32)
    qkv, weights, angle = qkv_inputs(route, sizes)
    spread = qkv - qkv.mean(1, keepdim=True)
    weights = weights.abs() / 2
    truth = exactly_attended(spread, weights, angle, heads=3, eight_bit=False)
    must = (exactly_attended(spread, weights, angle, heads=3, eight_bit=True) - truth).norm()
    shifted = spread.clone()
    shifted[..., -3 * 64 :] += common
    error = (attended(shifted, weights, angle, heads=3).double() - common - truth).norm()
    assert 0.3 * must < error < 1.2 * must  # softmax's weights are rounded as well


def test_attentions_weights_are_rounded_once_their_sum_is_taken() -> None:
    """With one value for all keys what comes out is off by what the weights are, and by no more."""
    q, k = (to_e4m3(50 * rand(1, 40, 2, 16, seed=seed)) for seed in (1, 2))
    v = torch.full((1, 40, 2, 16), 448.0).to(torch.float8_e4m3fn)
    mixed = plain_fp8_attention(q, k, v, score_scales_H=torch.full((2,), 1e-3))
    assert 0 < (mixed / 448 - 1).abs().max() < HALF_STEP
    assert (mixed / 448 - 1).abs().mean() < HALF_STEP / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 16, 32), (3, 7, 48, 16), (2, 33, 640, 96)], ids=str)
def test_a_linear_of_given_rows_and_weights_is_their_product(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    clips, tokens, channels, outputs = shape
    rows = fp8_rows(rand(clips, tokens, channels, seed=1, device=DEVICE))
    weight, scales = fp8_weight(rand(outputs, channels, seed=2, device=DEVICE))
    bias = rand(outputs, seed=3, device=DEVICE).to(torch.bfloat16 if CARD else dtype)
    ours = fp8_linear(rows, weight=weight, scales=scales, bias=bias)
    x = rows.values_BND.double() * rows.scales_BN1.double()
    truth = x @ (weight.double() * scales.double().t()).t() + bias.double()
    allowed = (truth.to(bias.dtype).double() - truth).abs().max()
    assert ours.dtype == bias.dtype
    assert (ours.double() - truth).abs().max() <= 2 * allowed + 1e-5 * truth.abs().max()


def test_weights_are_rounded_by_their_own_row() -> None:
    weight = rand(6, 48, seed=1) * 10.0 ** torch.arange(-3, 3)[:, None]
    values, scales = fp8_weight(weight)
    assert values.shape == (6, 48)
    assert scales.shape == (1, 6)
    error = (values.double() * scales.double().t() - weight.double()).abs()
    assert (error <= HALF_STEP * weight.abs() + LEAST_STEP * scales.t()).all()


def op_calls() -> dict[str, tuple[Any, ...]]:
    """Arguments for each registered op."""
    x, vector = rand(2, 5, 32, seed=1, device=DEVICE), rand(32, seed=2, device=DEVICE)
    angle = rand(5, 8, seed=3, device=DEVICE)
    rope = (angle.cos()[:, None], angle.sin()[:, None])
    weight, scales = fp8_weight(rand(48, 32, seed=6, device=DEVICE))
    bias = torch.ones(48, device=DEVICE, dtype=torch.bfloat16 if CARD else torch.float32)
    norms = fp8_norms(vector, vector, num_heads=2)
    return {
        "fp8_rows": (x, vector, vector),
        "affine_norm_fp8": (x, vector, vector, EPS),
        "gated_residual_norm_fp8": (x.clone(), x, vector, vector, vector, EPS),
        "gelu_fp8": (x,),
        "fp8_qkv": (rand(2, 5, 96, seed=5, device=DEVICE), norms.weights_2D, EPS, 2, *rope),
        "fp8_linear": (*fp8_rows(x), weight, scales, bias),
    }


# All but those of gradients, and but that of a schema where inputs have 8 bits: it reckons with them.
REGISTRATION = ("test_faketensor", "test_autograd_registration")
CHECKS = {
    "fp8_rows": ("test_schema", *REGISTRATION),
    "affine_norm_fp8": ("test_schema", *REGISTRATION),
    "gated_residual_norm_fp8": ("test_schema", *REGISTRATION),
    "gelu_fp8": ("test_schema", *REGISTRATION),
    "fp8_qkv": ("test_schema", *REGISTRATION),
    "fp8_linear": REGISTRATION,
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_an_op_says_of_itself_is_true(name: str) -> None:
    op = getattr(torch.ops.vgbatch, name).default
    found = torch.library.opcheck(op, op_calls()[name], test_utils=CHECKS[name])
    assert found == dict.fromkeys(CHECKS[name], "SUCCESS")


def small_block(
    x: torch.Tensor,
    qkv: torch.Tensor,
    vector: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    """Every op once; x and qkv change in place."""
    packed = fp8_qkv(qkv, weights_2D=torch.stack([vector, vector]), eps=EPS, num_heads=2, rope=(cos, sin))
    qkv.copy_(packed.values_BN3D)
    rows = fp8_rows(qkv.chunk(3, dim=-1)[2].contiguous(), weight=packed.v_scales_B1D, bias=packed.v_means_B1D)
    bias = vector.to(x.dtype)
    branch = fp8_linear(rows, weight=weight, scales=scales, bias=bias)
    branch += fp8_linear(
        affine_norm_fp8(x, weight=vector, bias=vector, eps=EPS), weight=weight, scales=scales, bias=bias
    )
    rows = gated_residual_norm_fp8(x, branch, gate=vector, weight=vector, bias=vector, eps=EPS)
    return gelu_fp8(fp8_linear(rows, weight=weight, scales=scales, bias=bias)).scales_BN1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16] if CARD else [torch.bfloat16, torch.float32], ids=str)
def test_ops_give_the_same_however_they_are_called(way: str, dtype: torch.dtype) -> None:
    def activations() -> list[torch.Tensor]:
        return [rand(2, 5, width, seed=1, dtype=dtype, device=DEVICE) for width in (32, 96)]

    angle = rand(5, 1, 8, seed=2, device=DEVICE)
    weight = fp8_weight(rand(32, 32, seed=4, device=DEVICE))
    weights = rand(32, seed=3, device=DEVICE), angle.cos(), angle.sin(), *weight
    expected_activations, ours = activations(), activations()
    expected = small_block(*expected_activations, *weights)
    assert torch.equal(WAYS[way](small_block)(*ours, *weights), expected)
    for changed, expected_change in zip(ours, expected_activations, strict=True):
        assert torch.equal(changed, expected_change)
