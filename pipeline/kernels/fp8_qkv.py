"""Queries, keys and values of self-attention in e4m3: normed, turned, centred, each within its range.

What all keys have in common adds the same to every score of a query, which softmax does not see; what all
values have in common is in every output. Both are taken off before rounding, which then errs by a part of
what is left. Nobody looks how large queries and keys are: after their norm no channel is beyond sqrt(D) times
its weight, and to a scale that is some hundred times too large e4m3 loses next to nothing.

Shapes: B clips, N tokens, D channels, H heads of K channels (D = H * K), R = K / 2 rotated pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pipeline.kernels import fp8_rows
from pipeline.kernels.fp8_rows import LARGEST, SMALLEST, row_channels, to_e4m3
from pipeline.kernels.qk_norm_rope import Rope, normed_and_rotated, qk_norm_rope, turns
from pipeline.kernels.rows import row_launch
from pipeline.kernels.triton_jit import jit, tl

# One key in so many is averaged: any vector may be taken off all keys, so that a sample is as exact as all. A
# prime, as it should not fall on the same column in every line of a picture.
_KEY_STEP = 13
_TOKENS_PER_PROGRAM = 5 * _KEY_STEP


class Fp8Norms(NamedTuple):
    """Weights of the norms of queries and keys in fp32, over their heads' scales; those multiplied."""

    weights_2D: torch.Tensor
    score_scales_H: torch.Tensor


class Fp8Qkv(NamedTuple):
    """All three in e4m3. Attention's output is what comes of these values, times scales, plus means."""

    values_BN3D: torch.Tensor
    v_scales_B1D: torch.Tensor
    v_means_B1D: torch.Tensor


def fp8_norms(q_weight: torch.Tensor, k_weight: torch.Tensor, *, num_heads: int) -> Fp8Norms:
    """weights: (D,), as qk_norm_rope_ takes them."""
    weights_2HK = torch.stack([q_weight, k_weight]).float().unflatten(1, (num_heads, -1))
    # A channel of a normed row is at most sqrt(D), and turning a pair keeps its length; a centred key is the
    # difference of two.
    bounds_2 = len(q_weight) ** 0.5 * weights_2HK.new_tensor([1.0, 2.0])
    scales_2H = weights_2HK.abs().amax(2).clamp(min=SMALLEST) * bounds_2[:, None] / LARGEST
    return Fp8Norms((weights_2HK / scales_2H[..., None]).flatten(1), scales_2H.prod(0))


def fp8_qkv(
    qkv_BN3D: torch.Tensor, *, weights_2D: torch.Tensor, eps: float, num_heads: int, rope: Rope
) -> Fp8Qkv:
    """qk_norm_rope of queries and keys, all three centred and in e4m3.

    qkv: contiguous, (B, N, 3 * D). weights: of fp8_norms. Moves 4.1 * B * N * D values of qkv's dtype, and as
    many as it has of a byte: reads values and a sample of keys for their means, then all, and writes it.
    """
    values_BN3D, affine_B2D = _fp8_qkv_op(qkv_BN3D, weights_2D, eps, num_heads, *rope)
    return Fp8Qkv(values_BN3D, affine_B2D[:, :1], affine_B2D[:, 1:])


def plain_fp8_qkv(
    qkv_BN3D: torch.Tensor,
    weights_2D: torch.Tensor,
    eps: float,
    num_heads: int,
    cos_N1R: torch.Tensor,
    sin_N1R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_BND, k_BND, v_BND = qkv_BN3D.float().chunk(3, dim=-1)
    q_BND, k_BND = (
        qk_norm_rope(x_BND, weight=weight, eps=eps, num_heads=num_heads, rope=(cos_N1R, sin_N1R)).flatten(2)
        for x_BND, weight in zip((q_BND, k_BND), weights_2D, strict=True)
    )
    k_BND = k_BND - k_BND[:, ::_KEY_STEP].mean(1, keepdim=True)
    v_means_B1D = v_BND.mean(1, keepdim=True)
    v_BND = v_BND - v_means_B1D
    v_scales_B1D = v_BND.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    values_BN3D = torch.cat([q_BND, k_BND, v_BND * (1 / v_scales_B1D)], dim=-1)
    return to_e4m3(values_BN3D), torch.cat([v_scales_B1D, v_means_B1D], dim=1)


def triton_fp8_qkv(
    qkv_BN3D: torch.Tensor,
    weights_2D: torch.Tensor,
    eps: float,
    num_heads: int,
    cos_N1R: torch.Tensor,
    sin_N1R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    clips, tokens, width = qkv_BN3D.shape
    channels = width // 3
    half = channels // num_heads // 2
    assert all(tensor.is_contiguous() for tensor in (qkv_BN3D, weights_2D, cos_N1R, sin_N1R))
    assert weights_2D.shape == (2, channels)
    assert cos_N1R.shape == sin_N1R.shape == (tokens, 1, half)
    (row_programs, _), tile = row_launch(qkv_BN3D, channels=channels)
    num_parts = -(-tokens // _TOKENS_PER_PROGRAM)
    partials_BP4D = weights_2D.new_empty((clips, num_parts, 4, channels))
    _partials_kernel[num_parts, clips](
        qkv_BN3D,
        weights_2D,
        cos_N1R,
        sin_N1R,
        partials_BP4D,
        tokens,
        eps,
        D=channels,
        R=half,
        BLOCK_D=tile["BLOCK_D"],
        STEP=_KEY_STEP,
        NUM_TOKENS=_TOKENS_PER_PROGRAM,
        num_warps=max(1, tile["BLOCK_D"] // 512),  # 16 channels a thread, which keeps three values of each
    )
    affine_B2D = weights_2D.new_empty((clips, 2, channels))
    inner_B2D = weights_2D.new_empty((clips, 2, channels))
    _means_kernel[-(-channels // 32), clips](
        partials_BP4D,
        affine_B2D,
        inner_B2D,
        num_parts,
        tokens,
        D=channels,
        STEP=_KEY_STEP,
        BLOCK_P=64,
        BLOCK_C=32,
    )
    values_BN3D = torch.empty_like(qkv_BN3D, dtype=fp8_rows.E4M3)
    _cast_kernel[row_programs, clips, 2](
        qkv_BN3D,
        weights_2D,
        cos_N1R,
        sin_N1R,
        affine_B2D,
        inner_B2D,
        values_BN3D,
        tokens,
        eps,
        D=channels,
        R=half,
        **tile,
    )
    return values_BN3D, affine_B2D


_fp8_qkv_op = torch.library.custom_op(
    "vgbatch::fp8_qkv", triton_fp8_qkv, mutates_args=(), device_types="cuda"
)
_fp8_qkv_op.register_kernel("cpu", plain_fp8_qkv)


@_fp8_qkv_op.register_fake
def _values_and_affine(
    qkv_BN3D: torch.Tensor, weights_2D: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    affine_B2D = weights_2D.new_empty((len(qkv_BN3D), *weights_2D.shape))
    return torch.empty_like(qkv_BN3D, dtype=fp8_rows.E4M3), affine_B2D


@jit
def _partials_kernel(
    qkv_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    partials_ptr: tl.tensor,
    num_tokens: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
) -> None:
    """Of a few tokens: the sum of every STEP-th key, then sum, least and largest of values."""
    part = tl.program_id(0)
    clip = tl.program_id(1).to(tl.int64)
    channels = row_channels(BLOCK_D)
    inside = channels < D
    first = part * NUM_TOKENS
    k_ptrs = qkv_ptr + (clip * num_tokens + first) * (3 * D) + D + channels
    out_ptrs = partials_ptr + (clip * tl.num_programs(0) + part) * (4 * D) + channels

    weight = tl.load(weights_ptr + D + channels, mask=inside, other=0.0)
    k_sum = tl.zeros([1, BLOCK_D], tl.float32)
    for index in range(0, NUM_TOKENS, STEP):
        k = tl.load(k_ptrs + index * (3 * D), mask=inside & (first + index < num_tokens), other=0.0)
        token = first + index + tl.zeros([1, 1], tl.int32)
        cos, sin = turns(cos_ptr, sin_ptr, token, num_tokens, D, R, BLOCK_D)
        k_sum += normed_and_rotated(k.to(tl.float32), weight, cos, sin, eps, D)
    tl.store(out_ptrs, k_sum, mask=inside)

    v_sum = tl.zeros([1, BLOCK_D], tl.float32)
    lowest = tl.full([1, BLOCK_D], float("inf"), tl.float32)
    highest = tl.full([1, BLOCK_D], float("-inf"), tl.float32)
    for start in range(0, NUM_TOKENS, 5):
        for ahead in tl.static_range(5):  # so many loads are on their way at once
            present = first + start + ahead < num_tokens
            v = tl.load(k_ptrs + (start + ahead) * (3 * D) + D, mask=inside & present, other=0.0)
            v = v.to(tl.float32)
            v_sum += v
            lowest = tl.where(present, tl.minimum(lowest, v), lowest)
            highest = tl.where(present, tl.maximum(highest, v), highest)
    tl.store(out_ptrs + D, v_sum, mask=inside)
    tl.store(out_ptrs + 2 * D, lowest, mask=inside)
    tl.store(out_ptrs + 3 * D, highest, mask=inside)


@jit
def _means_kernel(
    partials_ptr: tl.tensor,
    affine_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    num_parts: tl.tensor,
    num_tokens: tl.tensor,
    D: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Scales and means of values; means of keys, and what centred values are multiplied by."""
    clip = tl.program_id(1).to(tl.int64)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    k_sums = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    v_sums = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    lowest = tl.full([BLOCK_P, BLOCK_C], float("inf"), tl.float32)
    highest = tl.full([BLOCK_P, BLOCK_C], float("-inf"), tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        parts = start + tl.arange(0, BLOCK_P)[:, None]
        inside = (parts < num_parts) & (channels < D)[None, :]
        ptrs = partials_ptr + (clip * num_parts + parts) * (4 * D) + channels[None, :]
        k_sums += tl.load(ptrs, mask=inside, other=0.0)
        v_sums += tl.load(ptrs + D, mask=inside, other=0.0)
        lowest = tl.minimum(lowest, tl.load(ptrs + 2 * D, mask=inside, other=float("inf")))
        highest = tl.maximum(highest, tl.load(ptrs + 3 * D, mask=inside, other=float("-inf")))
    k_mean = tl.sum(k_sums, axis=0) / tl.cdiv(num_tokens, STEP)
    v_mean = tl.sum(v_sums, axis=0) / num_tokens
    largest = tl.maximum(tl.max(highest, axis=0) - v_mean, v_mean - tl.min(lowest, axis=0))
    scale = tl.div_rn(tl.maximum(largest, 1e-30), 448.0)  # SMALLEST and LARGEST
    cells = clip * (2 * D) + channels
    tl.store(affine_ptr + cells, scale, mask=channels < D)
    tl.store(affine_ptr + D + cells, v_mean, mask=channels < D)
    tl.store(inner_ptr + cells, k_mean, mask=channels < D)
    tl.store(inner_ptr + D + cells, tl.div_rn(1.0, scale), mask=channels < D)


@jit
def _cast_kernel(
    qkv_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    affine_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    clip = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channels = row_channels(BLOCK_D)
    inside = (tokens < num_tokens) & (channels < D)
    cells = (clip * num_tokens + tokens) * (3 * D) + channels
    affine_ptr += clip * (2 * D)
    inner_ptr += clip * (2 * D)
    if tl.program_id(2) == 0:  # queries and keys, which are turned by the same angles
        cos, sin = turns(cos_ptr, sin_ptr, tokens, num_tokens, D, R, BLOCK_D)
        for kind in tl.static_range(2):
            x = tl.load(qkv_ptr + cells + kind * D, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weights_ptr + kind * D + channels, mask=channels < D, other=0.0)
            x = normed_and_rotated(x, weight, cos, sin, eps, D)
            if kind == 1:
                x -= tl.load(inner_ptr + channels, mask=channels < D, other=0.0)
            tl.store(out_ptr + cells + kind * D, x.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        x = tl.load(qkv_ptr + cells + 2 * D, mask=inside, other=0.0).to(tl.float32)
        x -= tl.load(affine_ptr + D + channels, mask=channels < D, other=0.0)
        x *= tl.load(inner_ptr + D + channels, mask=channels < D, other=0.0)
        tl.store(out_ptr + cells + 2 * D, x.to(out_ptr.dtype.element_ty), mask=inside)
