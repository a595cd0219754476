"""The residual stream takes in a branch's output, and the next branch gets its norm: both in one pass.

Shapes: B clips, N tokens, D channels.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.kernels.affine_norm import affine_norm, affine_normed
from pipeline.kernels.gated_residual import take_in_, taken_in
from pipeline.kernels.rows import clip_stride, row_launch
from pipeline.kernels.triton_jit import jit, tl


def gated_residual_norm(
    x_BND: torch.Tensor,
    branch_BND: torch.Tensor,
    *,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Adds branch * gate to x in place, rounded to x's dtype, and returns the affine_norm of the new x.

    x, branch: contiguous, of one dtype. gate (none: the branch as it is), weight, bias: fp32 in shapes
    (D,), (1, 1, D) or (B, 1, D). Moves 4 * B * N * D values: reads x and branch, writes x and its norm.
    """
    return _gated_residual_norm_op(x_BND, branch_BND, gate, weight, bias, eps)


def plain_gated_residual_norm(
    x_BND: torch.Tensor,
    branch_BND: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    take_in_(x_BND, branch_BND, gate=gate)
    return affine_norm(x_BND, weight=weight, bias=bias, eps=eps)


def triton_gated_residual_norm(
    x_BND: torch.Tensor,
    branch_BND: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    assert x_BND.is_contiguous()
    assert branch_BND.is_contiguous()
    assert branch_BND.shape == x_BND.shape
    _, tokens, channels = x_BND.shape
    out_BND = torch.empty_like(x_BND)
    grid, tile = row_launch(x_BND, channels=channels)
    strides = 0 if gate is None else clip_stride(gate), clip_stride(weight), clip_stride(bias)
    _gated_residual_norm_kernel[grid](
        x_BND,
        branch_BND,
        gate,
        weight,
        bias,
        out_BND,
        tokens,
        *strides,
        eps,
        D=channels,
        **tile,
        enable_fp_fusion=False,  # see taken_in
    )
    return out_BND


_gated_residual_norm_op = torch.library.custom_op(
    "vgbatch::gated_residual_norm",
    triton_gated_residual_norm,
    mutates_args=("x_BND",),
    device_types="cuda",
)
_gated_residual_norm_op.register_kernel("cpu", plain_gated_residual_norm)


@_gated_residual_norm_op.register_fake
def _like_x(x_BND: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x_BND)


@jit
def _gated_residual_norm_kernel(
    x_ptr: tl.tensor,
    branch_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    gate_stride: tl.tensor,
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
    gate_ptrs = None if gate_ptr is None else gate_ptr + clip * gate_stride + channels
    sums = taken_in(x_ptr + cells, branch_ptr + cells, gate_ptrs, inside, channels < D)
    weight_ptrs = weight_ptr + clip * weight_stride + channels
    bias_ptrs = bias_ptr + clip * bias_stride + channels
    normed = affine_normed(sums.to(tl.float32), weight_ptrs, bias_ptrs, inside, eps, D)
    tl.store(out_ptr + cells, normed, mask=inside)
