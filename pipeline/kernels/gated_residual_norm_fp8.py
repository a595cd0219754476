"""gated_residual_norm (gated_residual_norm.py) whose norm is read by an 8-bit product: e4m3 rows with scales.

Shapes: B clips, N tokens, D channels.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.kernels.affine_norm import affine_norm, affine_normed
from pipeline.kernels.fp8_rows import Fp8Rows, empty_rows, plain_fp8_rows, row_cells, store_fp8_rows
from pipeline.kernels.gated_residual import take_in_, taken_in
from pipeline.kernels.rows import clip_stride, row_launch
from pipeline.kernels.triton_jit import jit, tl


def gated_residual_norm_fp8(
    x_BND: torch.Tensor,
    branch_BND: torch.Tensor,
    *,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> Fp8Rows:
    """Inputs as in gated_residual_norm. Moves 3 * B * N * D values of x's dtype and B * N * D of a byte."""
    return Fp8Rows(*_gated_residual_norm_fp8_op(x_BND, branch_BND, gate, weight, bias, eps))


def plain_gated_residual_norm_fp8(
    x_BND: torch.Tensor,
    branch_BND: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    take_in_(x_BND, branch_BND, gate=gate)
    return plain_fp8_rows(affine_norm(x_BND.float(), weight=weight, bias=bias, eps=eps))


def triton_gated_residual_norm_fp8(
    x_BND: torch.Tensor,
    branch_BND: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert x_BND.is_contiguous()
    assert branch_BND.is_contiguous()
    assert branch_BND.shape == x_BND.shape
    _, tokens, channels = x_BND.shape
    out = empty_rows(x_BND)
    grid, tile = row_launch(x_BND, channels=channels)
    strides = 0 if gate is None else clip_stride(gate), clip_stride(weight), clip_stride(bias)
    _gated_residual_norm_fp8_kernel[grid](
        x_BND,
        branch_BND,
        gate,
        weight,
        bias,
        *out,
        tokens,
        *strides,
        eps,
        D=channels,
        **tile,
        enable_fp_fusion=False,  # see taken_in
    )
    return out


_gated_residual_norm_fp8_op = torch.library.custom_op(
    "vgbatch::gated_residual_norm_fp8",
    triton_gated_residual_norm_fp8,
    mutates_args=("x_BND",),
    device_types="cuda",
)
_gated_residual_norm_fp8_op.register_kernel("cpu", plain_gated_residual_norm_fp8)


@_gated_residual_norm_fp8_op.register_fake
def _rows_of_x(x_BND: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_rows(x_BND)


@jit
def _gated_residual_norm_fp8_kernel(
    x_ptr: tl.tensor,
    branch_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_tokens: tl.tensor,
    gate_stride: tl.tensor,
    weight_stride: tl.tensor,
    bias_stride: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    clip, channels, rows, present, cells, inside = row_cells(num_tokens, D, BLOCK_D, ROWS)
    gate_ptrs = None if gate_ptr is None else gate_ptr + clip * gate_stride + channels
    sums = taken_in(x_ptr + cells, branch_ptr + cells, gate_ptrs, inside, channels < D)
    weight_ptrs = weight_ptr + clip * weight_stride + channels
    bias_ptrs = bias_ptr + clip * bias_stride + channels
    normed = affine_normed(sums.to(tl.float32), weight_ptrs, bias_ptrs, inside, eps, D)
    store_fp8_rows(normed, values_ptr + cells, scales_ptr + rows, inside, present)
