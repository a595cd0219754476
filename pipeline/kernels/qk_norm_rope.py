"""Queries and keys of attention: RMS norm across all heads, then rotary position embedding.

Shapes: B clips, N tokens, D channels, H heads of K channels (D = H * K), R = K / 2 rotated pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from pipeline.kernels.rows import row_launch
from pipeline.kernels.triton_jit import jit, tl

Rope = tuple[torch.Tensor, torch.Tensor]  # cos_N1R, sin_N1R in fp32


def qk_norm(x_BND: torch.Tensor, *, weight: torch.Tensor, eps: float, num_heads: int) -> torch.Tensor:
    """x over its root mean square across D, times weight, as (B, N, H, K) in x's dtype."""
    return _normed(x_BND, weight, eps).to(x_BND.dtype).unflatten(-1, (num_heads, -1))


def qk_norm_rope(
    x_BND: torch.Tensor, *, weight: torch.Tensor, eps: float, num_heads: int, rope: Rope
) -> torch.Tensor:
    """As qk_norm, with each pair of neighbouring channels rotated by its token's angle, rounded once."""
    x_BNHK = _normed(x_BND, weight, eps).unflatten(-1, (num_heads, -1))
    cos_N1R, sin_N1R = rope
    even_BNHR, odd_BNHR = x_BNHK[..., 0::2], x_BNHK[..., 1::2]
    rotated = (even_BNHR * cos_N1R - odd_BNHR * sin_N1R, even_BNHR * sin_N1R + odd_BNHR * cos_N1R)
    return torch.stack(rotated, dim=-1).flatten(-2).to(x_BND.dtype)


def _normed(x_BND: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x_BND.float(), x_BND.shape[-1:], weight.float(), eps)


def qk_norm_rope_(
    qkv_BN3D: torch.Tensor,
    *,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    num_heads: int,
    rope: Rope,
) -> None:
    """qk_norm_rope of the queries and keys of a fused projection, in place; values stay as they are.

    qkv: contiguous, (B, N, 3 * D): queries, keys, values. weights: (D,) of any float dtype.
    Moves 4 * B * N * D values: reads and writes queries and keys.
    """
    _qk_norm_rope_op(qkv_BN3D, q_weight, k_weight, eps, num_heads, *rope)


def plain_qk_norm_rope_(
    qkv_BN3D: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    num_heads: int,
    cos_N1R: torch.Tensor,
    sin_N1R: torch.Tensor,
) -> None:
    for x_BND, weight in zip(qkv_BN3D.chunk(3, dim=-1), (q_weight, k_weight), strict=False):
        rotated_BNHK = qk_norm_rope(
            x_BND, weight=weight, eps=eps, num_heads=num_heads, rope=(cos_N1R, sin_N1R)
        )
        x_BND.copy_(rotated_BNHK.flatten(2))


def triton_qk_norm_rope_(
    qkv_BN3D: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    num_heads: int,
    cos_N1R: torch.Tensor,
    sin_N1R: torch.Tensor,
) -> None:
    channels = q_weight.shape[0]
    half = channels // num_heads // 2
    _, tokens, width = qkv_BN3D.shape
    assert all(tensor.is_contiguous() for tensor in (qkv_BN3D, q_weight, k_weight, cos_N1R, sin_N1R))
    assert width == 3 * channels
    assert cos_N1R.shape == sin_N1R.shape == (tokens, 1, half)
    grid, tile = row_launch(qkv_BN3D, channels=channels)
    _qk_norm_rope_kernel[grid](
        qkv_BN3D, q_weight, k_weight, cos_N1R, sin_N1R, tokens, eps, D=channels, R=half, **tile
    )


_qk_norm_rope_op = torch.library.custom_op(
    "vgbatch::qk_norm_rope_", triton_qk_norm_rope_, mutates_args=("qkv_BN3D",), device_types="cuda"
)
_qk_norm_rope_op.register_kernel("cpu", plain_qk_norm_rope_)


@_qk_norm_rope_op.register_fake
def _nothing(*_: Any) -> None:
    pass


@jit
def _qk_norm_rope_kernel(
    qkv_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    num_tokens: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    clip = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channels = tl.arange(0, BLOCK_D)[None, :]
    inside = (tokens < num_tokens) & (channels < D)
    q_ptrs = qkv_ptr + (clip * num_tokens + tokens) * (3 * D) + channels
    cos, sin = turns(cos_ptr, sin_ptr, tokens, num_tokens, D, R, BLOCK_D)
    _norm_and_rotate(q_ptrs, q_weight_ptr + channels, cos, sin, inside, eps, D)
    _norm_and_rotate(q_ptrs + D, k_weight_ptr + channels, cos, sin, inside, eps, D)


@jit
def _norm_and_rotate(
    x_ptrs: tl.tensor,
    weight_ptrs: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    inside: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
) -> None:
    x = tl.load(x_ptrs, mask=inside, other=0.0)
    weight = tl.load(weight_ptrs, mask=inside, other=0.0).to(tl.float32)
    rotated = normed_and_rotated(x.to(tl.float32), weight, cos, sin, eps, D)
    tl.store(x_ptrs, rotated.to(x.dtype), mask=inside)


@jit
def turns(
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    tokens: tl.tensor,
    num_tokens: tl.tensor,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """For kernels: cosine and sine for each pair of channels of tokens (ROWS, 1)."""
    pairs = tl.arange(0, BLOCK_D // 2)[None, :]
    turned = (tokens < num_tokens) & (pairs < D // 2)
    angles = tokens * R + pairs % R
    cos = tl.load(cos_ptr + angles, mask=turned, other=0.0)
    return cos, tl.load(sin_ptr + angles, mask=turned, other=0.0)


@jit
def normed_and_rotated(
    x: tl.tensor, weight: tl.tensor, cos: tl.tensor, sin: tl.tensor, eps: tl.tensor, D: tl.constexpr
) -> tl.tensor:
    """For kernels: qk_norm_rope of fp32 rows x, zero past D. cos, sin: of turns."""
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None] * weight
    even, odd = tl.split(tl.reshape(normed, [cos.shape[0], cos.shape[1], 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), x.shape)
