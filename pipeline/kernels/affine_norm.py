"""Layer norm, then times a weight, plus a bias: each block's modulated norms and its affine one.

Shapes: B clips, N tokens, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from pipeline.kernels.rows import clip_stride, row_launch
from pipeline.kernels.triton_jit import jit, tl


def affine_norm(x_BND: torch.Tensor, *, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer norm over D in fp32, times weight, plus bias, in x's dtype: plain torch, for training too.

    weight, bias: fp32, broadcastable to x; for a modulated norm weight is 1 + scale and bias is shift.
    """
    normed_BND = F.layer_norm(x_BND.float(), x_BND.shape[-1:], eps=eps)
    return (normed_BND * weight + bias).to(x_BND.dtype)


def fused_affine_norm(
    x_BND: torch.Tensor, *, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """affine_norm in one pass, without a backward. x: contiguous; weight, bias: (D,), (1, 1, D) or (B, 1, D).

    Moves 2 * B * N * D values: reads x, writes the result.
    """
    return _affine_norm_op(x_BND, weight, bias, eps)


def triton_affine_norm(
    x_BND: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    assert x_BND.is_contiguous()
    _, tokens, channels = x_BND.shape
    out_BND = torch.empty_like(x_BND)
    grid, tile = row_launch(x_BND, channels=channels)
    strides = clip_stride(weight), clip_stride(bias)
    _affine_norm_kernel[grid](x_BND, weight, bias, out_BND, tokens, *strides, eps, D=channels, **tile)
    return out_BND


_affine_norm_op = torch.library.custom_op(
    "vgbatch::affine_norm", triton_affine_norm, mutates_args=(), device_types="cuda"
)


@_affine_norm_op.register_kernel("cpu")
def _on_cpu(x_BND: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return affine_norm(x_BND, weight=weight, bias=bias, eps=eps)


@_affine_norm_op.register_fake
def _like_x(x_BND: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x_BND)


@jit
def _affine_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    weight_stride: tl.tensor,
    bias_stride: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    clip = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_D)[None, :]
    inside = (tokens < num_tokens)[:, None] & (channels < D)
    cells = (clip * num_tokens + tokens)[:, None] * D + channels
    x = tl.load(x_ptr + cells, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    weight_ptrs = weight_ptr + clip * weight_stride + channels
    bias_ptrs = bias_ptr + clip * bias_stride + channels
    tl.store(out_ptr + cells, affine_normed(x, weight_ptrs, bias_ptrs, inside, eps, D), mask=inside)


@jit
def affine_normed(
    x: tl.tensor,
    weight_ptrs: tl.tensor,
    bias_ptrs: tl.tensor,
    inside: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
) -> tl.tensor:
    """For kernels: affine_norm of fp32 rows x, zero where they are not inside, by vectors (1, BLOCK_D)."""
    mean = tl.div_rn(tl.sum(x, axis=1), D * 1.0)  # to nearest, or a constant row would not become its bias
    centred = tl.where(inside, x - mean[:, None], 0.0)
    reciprocal = tl.rsqrt(tl.sum(centred * centred, axis=1) / D + eps)
    # Read last: they are in the cache, and held through the sums they would halve the programs in flight.
    weight = tl.load(weight_ptrs, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptrs, mask=inside, other=0.0).to(tl.float32)
    return centred * reciprocal[:, None] * weight + bias
