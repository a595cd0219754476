"""affine_norm (affine_norm.py) whose result is read by an 8-bit product: its rows in e4m3 with their scales.

Shapes: B clips, N tokens, D channels.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.kernels.affine_norm import affine_norm, affine_normed
from pipeline.kernels.fp8_rows import Fp8Rows, empty_rows, plain_fp8_rows, row_cells, store_fp8_rows
from pipeline.kernels.rows import clip_stride, row_launch
from pipeline.kernels.triton_jit import jit, tl


def affine_norm_fp8(x_BND: torch.Tensor, *, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Fp8Rows:
    """Inputs as in fused_affine_norm. Moves B * N * D values of x's dtype and as many of a byte."""
    return Fp8Rows(*_affine_norm_fp8_op(x_BND, weight, bias, eps))


def plain_affine_norm_fp8(
    x_BND: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return plain_fp8_rows(affine_norm(x_BND.float(), weight=weight, bias=bias, eps=eps))


def triton_affine_norm_fp8(
    x_BND: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    assert x_BND.is_contiguous()
    _, tokens, channels = x_BND.shape
    out = empty_rows(x_BND)
    grid, tile = row_launch(x_BND, channels=channels)
    strides = clip_stride(weight), clip_stride(bias)
    _affine_norm_fp8_kernel[grid](x_BND, weight, bias, *out, tokens, *strides, eps, D=channels, **tile)
    return out


_affine_norm_fp8_op = torch.library.custom_op(
    "vgbatch::affine_norm_fp8", triton_affine_norm_fp8, mutates_args=(), device_types="cuda"
)
_affine_norm_fp8_op.register_kernel("cpu", plain_affine_norm_fp8)


@_affine_norm_fp8_op.register_fake
def _rows_of_x(x_BND: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_rows(x_BND)


@jit
def _affine_norm_fp8_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_tokens: tl.tensor,
    weight_stride: tl.tensor,
    bias_stride: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    clip, channels, rows, present, cells, inside = row_cells(num_tokens, D, BLOCK_D, ROWS)
    x = tl.load(x_ptr + cells, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    weight_ptrs = weight_ptr + clip * weight_stride + channels
    bias_ptrs = bias_ptr + clip * bias_stride + channels
    normed = affine_normed(x, weight_ptrs, bias_ptrs, inside, eps, D)
    store_fp8_rows(normed, values_ptr + cells, scales_ptr + rows, inside, present)
