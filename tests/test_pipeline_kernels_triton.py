"""Fused ops against float64: their kernels on a card, or in Triton's interpreter, and what runs on the CPU.

The interpreter's bf16 is wrong, so without a card kernels run in fp32 alone. Odd sizes are in the grid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipeline.kernels.affine_norm import fused_affine_norm, triton_affine_norm
from pipeline.kernels.gated_residual import gated_residual
from pipeline.kernels.gated_residual_norm import gated_residual_norm, triton_gated_residual_norm
from pipeline.kernels.gelu import linear_gelu
from pipeline.kernels.qk_norm_rope import qk_norm_rope_, triton_qk_norm_rope_
from pipeline.kernels.text_attention import text_attention, triton_text_attention
from tests.pipeline_ops import EPS, assert_close, rand, rms_normed, rotated, tanh_gelu

pytestmark = pytest.mark.usefixtures("interpreter_loops")

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
HALF_AND_FULL = (torch.bfloat16, torch.float32)
# The op itself on the CPU; its kernel wherever kernels run.
ROUTES = [("op", "cpu", dtype) for dtype in HALF_AND_FULL]
if find_spec("triton"):
    ROUTES += [("kernel", DEVICE, dtype) for dtype in (HALF_AND_FULL if CARD else (torch.float32,))]

SHAPES = ((1, 1, 48), (3, 33, 96), (3, 7, 1536), (1, 7, 3072))  # clips, tokens, channels
HEADS = (
    (1, 1, 2, 12),
    (3, 33, 5, 16),
    (3, 7, 3, 64),
    (1, 7, 24, 128),
)  # clips, tokens, heads, channels of one
ROWS = 512  # of the text buffer


class Route:
    def __init__(self, kind: str, device: str, dtype: torch.dtype) -> None:
        self.is_op = kind == "op"
        self.device = device
        self.dtype = dtype

    def rand(self, *shape: int, seed: int) -> torch.Tensor:
        """In the dtype of activations."""
        return rand(*shape, seed=seed, dtype=self.dtype, device=self.device)

    def fp32(self, *shape: int, seed: int) -> torch.Tensor:
        return rand(*shape, seed=seed, device=self.device)


@pytest.fixture(params=ROUTES, ids=lambda route: " ".join(map(str, route)))
def route(request: pytest.FixtureRequest) -> Route:
    return Route(*request.param)


def layer_normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * weight + bias


def run_affine_norm(route: Route, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if route.is_op:
        return fused_affine_norm(x, weight=weight, bias=bias, eps=EPS)
    return triton_affine_norm(x, weight, bias, EPS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_affine_norm(route: Route, shape: tuple[int, int, int]) -> None:
    clips, _, channels = shape
    x = route.rand(*shape, seed=1)
    # As the blocks have them: shift and scale are slices of one table with a row for each clip.
    bias, weight = route.fp32(clips, 6, channels, seed=2).chunk(6, dim=1)[3:5]
    assert_close(run_affine_norm(route, x, weight, bias), layer_normed, x, weight, bias, dtype=route.dtype)


def test_affine_norm_by_vectors_that_all_clips_share(route: Route) -> None:
    x = route.rand(3, 7, 96, seed=1)
    weight, bias = route.fp32(96, seed=2), route.fp32(1, 1, 96, seed=3)
    assert_close(run_affine_norm(route, x, weight, bias), layer_normed, x, weight, bias, dtype=route.dtype)


def test_affine_norm_of_a_constant_row_is_its_bias(route: Route) -> None:
    x = torch.full((1, 2, 48), 300.0, dtype=route.dtype, device=route.device)
    weight, bias = route.fp32(48, seed=1), route.fp32(48, seed=2)
    assert torch.equal(run_affine_norm(route, x, weight, bias), bias.to(route.dtype).expand(1, 2, 48))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_residual_norm(route: Route, shape: tuple[int, int, int], gated: bool) -> None:
    clips, _, channels = shape
    x, branch = route.rand(*shape, seed=1), route.rand(*shape, seed=2)
    gate = route.fp32(clips, 6, channels, seed=3)[:, 2:3] if gated else None
    weight, bias = route.fp32(channels, seed=4), route.fp32(clips, 1, channels, seed=5)
    summed = gated_residual(x, branch, gate=gate) if gated else x + branch
    if route.is_op:
        normed = gated_residual_norm(x, branch, gate=gate, weight=weight, bias=bias, eps=EPS)
    else:
        normed = triton_gated_residual_norm(x, branch, gate, weight, bias, EPS)
    assert torch.equal(x, summed)
    assert_close(normed, layer_normed, summed, weight, bias, dtype=route.dtype)


@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_qk_norm_rope_turns_queries_and_keys_in_place(route: Route, sizes: tuple[int, ...]) -> None:
    clips, tokens, heads, head_channels = sizes
    channels = heads * head_channels
    given = route.rand(clips, tokens, 3 * channels, seed=1)
    weights = route.rand(2, channels, seed=2)
    angle = route.fp32(tokens, head_channels // 2, seed=3)
    rope = (angle.cos()[:, None], angle.sin()[:, None])

    qkv = given.clone()
    if route.is_op:
        qk_norm_rope_(qkv, q_weight=weights[0], k_weight=weights[1], eps=EPS, num_heads=heads, rope=rope)
    else:
        triton_qk_norm_rope_(qkv, *weights, EPS, heads, *rope)

    def formula(x: torch.Tensor, weight: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        return rotated(rms_normed(x, weight).unflatten(-1, (heads, -1)), angle).flatten(2)

    parts, given_parts = qkv.chunk(3, dim=-1), given.chunk(3, dim=-1)
    for part, given_part, weight in zip(parts[:2], given_parts[:2], weights, strict=True):
        assert_close(part, formula, given_part, weight, angle, dtype=route.dtype)
    assert torch.equal(parts[2], given_parts[2])


def padded(buffer_BMHK: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """As the model has it: the row after a prompt's own repeated to the end."""
    sources = torch.stack([torch.arange(ROWS).clamp(max=count) for count in counts])
    return buffer_BMHK[torch.arange(len(counts))[:, None], sources]


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ((1, 1, 2, 12), (0,)),
        ((3, 33, 2, 16), (1, 511, 512)),
        ((3, 7, 3, 64), (512, 5, 0)),
        ((1, 33, 2, 128), (70,)),
        ((3, 7, 1, 128), (31, 32, 33)),
    ],
    ids=str,
)
def test_text_attention_is_attention_to_all_the_padding(
    route: Route, sizes: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    clips, tokens, heads, head_channels = sizes
    q = route.rand(clips, tokens, heads * head_channels, seed=1)
    q_weight = route.rand(heads * head_channels, seed=2)
    k, v = (route.rand(clips, ROWS, heads, head_channels, seed=seed) for seed in (3, 4))

    def formula(q: torch.Tensor, q_weight: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = rms_normed(q, q_weight).unflatten(-1, (heads, -1))
        scores = torch.einsum("bnhk,bmhk->bhnm", q, padded(k, counts)) / head_channels**0.5
        return torch.einsum("bhnm,bmhk->bnhk", scores.softmax(-1), padded(v, counts)).flatten(2)

    expected = (formula, q, q_weight, k.clone(), v.clone())
    for clip, count in enumerate(counts):  # what lies behind is never read
        k[clip, count + 1 :] = v[clip, count + 1 :] = torch.nan
    counts_B = torch.tensor(counts, dtype=torch.int32, device=route.device)
    if route.is_op:
        mixed = text_attention(q, k, v, counts_B, q_weight=q_weight, eps=EPS)
    else:
        mixed = triton_text_attention(q, k, v, counts_B, q_weight, EPS)
    assert_close(mixed, *expected, dtype=route.dtype)


@pytest.mark.parametrize("device", ["cpu", DEVICE] if CARD else ["cpu"])
@pytest.mark.parametrize("dtype", HALF_AND_FULL, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 7, 48), (1, 33, 96)], ids=str)
def test_linear_gelu(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    x, weight, bias = (
        rand(*size, seed=seed, dtype=dtype, device=device)
        for seed, size in enumerate((shape, (2 * shape[2], shape[2]), (2 * shape[2],)))
    )
    weight /= shape[2] ** 0.5  # so that activations fall where the two forms of GELU differ

    def formula(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return tanh_gelu(x @ weight.T + bias)

    assert_close(linear_gelu(x, weight, bias), formula, x, weight, bias, dtype=dtype)


def op_calls() -> dict[str, tuple[Any, ...]]:
    """Arguments for each registered op."""
    x, vector = rand(2, 5, 24, seed=1, device=DEVICE), rand(24, seed=2, device=DEVICE)
    angle = rand(5, 6, seed=3, device=DEVICE)
    buffer = rand(2, 8, 2, 12, seed=4, device=DEVICE)
    counts = torch.tensor([3, 8], dtype=torch.int32, device=DEVICE)
    rope = (angle.cos()[:, None], angle.sin()[:, None])
    return {
        "affine_norm": (x, vector, vector, EPS),
        "gated_residual_norm": (x.clone(), x, vector, vector, vector, EPS),
        "qk_norm_rope_": (rand(2, 5, 72, seed=5, device=DEVICE), vector, vector, EPS, 2, *rope),
        "text_attention": (x, buffer, buffer, counts, vector, EPS),
        "linear_gelu": (x, rand(48, 24, seed=6, device=DEVICE), rand(48, seed=7, device=DEVICE)),
    }


@pytest.mark.parametrize(
    "name", ["affine_norm", "gated_residual_norm", "qk_norm_rope_", "text_attention", "linear_gelu"]
)
def test_what_an_op_says_of_itself_is_true(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.vgbatch, name).default, op_calls()[name])


def small_block(
    x: torch.Tensor, qkv: torch.Tensor, vector: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Every op once; x and qkv change in place."""
    normed = fused_affine_norm(x, weight=vector, bias=vector, eps=EPS)
    qk_norm_rope_(qkv, q_weight=vector, k_weight=vector, eps=EPS, num_heads=2, rope=(cos, sin))
    q, k, v = (part.contiguous() for part in qkv.chunk(3, dim=-1))
    k, v = (part.unflatten(-1, (2, -1)) for part in (k, v))
    counts = torch.full((2,), 3, dtype=torch.int32, device=x.device)
    mixed = text_attention(q, k, v, counts, q_weight=vector, eps=EPS)
    normed = gated_residual_norm(x, mixed + normed, gate=vector, weight=vector, bias=vector, eps=EPS)
    return linear_gelu(normed, vector.outer(vector).to(x.dtype), vector.to(x.dtype))


def in_inference_mode(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As the engine runs: activations are made in the mode, weights were there before."""

    @torch.inference_mode()
    def call(x: torch.Tensor, qkv: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        own_x, own_qkv = x.clone(), qkv.clone()
        result = function(own_x, own_qkv, *weights)
        x.copy_(own_x)
        qkv.copy_(own_qkv)
        return result

    return call


def in_a_cuda_graph(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Captured on other activations than those it is replayed on."""

    def call(x: torch.Tensor, qkv: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        own_x, own_qkv = torch.zeros_like(x), torch.zeros_like(qkv)
        function(own_x, own_qkv, *weights)  # kernels are compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = function(own_x, own_qkv, *weights)
        own_x.copy_(x)
        own_qkv.copy_(qkv)
        graph.replay()
        x.copy_(own_x)
        qkv.copy_(own_qkv)
        return result

    return call


WAYS: dict[str, Callable[..., Callable[..., torch.Tensor]]] = {
    "traced": partial(torch.compile, fullgraph=True, backend="aot_eager"),
    "in inference mode": in_inference_mode,
}
if CARD:
    WAYS |= {"compiled": partial(torch.compile, fullgraph=True), "in a CUDA graph": in_a_cuda_graph}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", HALF_AND_FULL, ids=str)
def test_ops_give_the_same_however_they_are_called(way: str, dtype: torch.dtype) -> None:
    def activations() -> list[torch.Tensor]:
        return [rand(2, 5, width, seed=1, dtype=dtype, device=DEVICE) for width in (24, 72)]

    angle = rand(5, 1, 6, seed=2, device=DEVICE)
    weights = rand(24, seed=3, device=DEVICE), angle.cos(), angle.sin()
    expected_activations, ours = activations(), activations()
    expected = small_block(*expected_activations, *weights)
    assert torch.equal(WAYS[way](small_block)(*ours, *weights), expected)
    for changed, expected_change, given in zip(ours, expected_activations, activations(), strict=True):
        assert torch.equal(changed, expected_change)
        assert not torch.equal(changed, given)
