"""Rows as 8-bit floats: e4m3 values, and one fp32 scale for each row, which its largest value fills.

Shapes: B clips, N tokens, D channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pipeline.kernels.rows import clip_stride, row_launch
from pipeline.kernels.triton_jit import jit, tl

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST = 1e-30  # of a row's largest value, as a row of zeros must have a scale to be divided by


class Fp8Rows(NamedTuple):
    """x is about values * scales; the last axis of scales has one element."""

    values_BND: torch.Tensor
    scales_BN1: torch.Tensor


def plain_fp8_rows(x_BND: torch.Tensor) -> Fp8Rows:
    """x's rows, rounded once."""
    x_BND = x_BND.float()
    largest_BN1 = x_BND.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    return Fp8Rows(to_e4m3(x_BND * (LARGEST / largest_BN1)), largest_BN1 / LARGEST)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """To the nearest, ties to even. What is too large becomes the largest, as not every torch casts it."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def empty_rows(x_BND: torch.Tensor) -> Fp8Rows:
    """Room for x's."""
    scales_BN1 = x_BND.new_empty((*x_BND.shape[:2], 1), dtype=torch.float32)
    return Fp8Rows(torch.empty_like(x_BND, dtype=E4M3), scales_BN1)


def fp8_rows(
    x_BND: torch.Tensor, *, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> Fp8Rows:
    """The rows of x, or of x times weight plus bias, in e4m3.

    x: contiguous, of any float dtype. weight, bias: fp32 in shapes (D,), (1, 1, D) or (B, 1, D), both or
    neither. Moves B * N * D values of x's dtype and as many of a byte: reads x, writes the result.
    """
    return Fp8Rows(*_fp8_rows_op(x_BND, weight, bias))


def plain_affine_fp8_rows(
    x_BND: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return plain_fp8_rows(x_BND if weight is None or bias is None else x_BND.float() * weight + bias)


def triton_fp8_rows(
    x_BND: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    assert x_BND.is_contiguous()
    assert (weight is None) == (bias is None)
    _, tokens, channels = x_BND.shape
    out = empty_rows(x_BND)
    grid, tile = row_launch(x_BND, channels=channels)
    strides = [0 if vector is None else clip_stride(vector) for vector in (weight, bias)]
    _fp8_rows_kernel[grid](x_BND, weight, bias, *out, tokens, *strides, D=channels, **tile)
    return out


_fp8_rows_op = torch.library.custom_op(
    "vgbatch::fp8_rows", triton_fp8_rows, mutates_args=(), device_types="cuda"
)
_fp8_rows_op.register_kernel("cpu", plain_affine_fp8_rows)


@_fp8_rows_op.register_fake
def _rows_of_x(x_BND: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_rows(x_BND)


@jit
def _fp8_rows_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_tokens: tl.tensor,
    weight_stride: tl.tensor,
    bias_stride: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    clip, channels, rows, present, cells, inside = row_cells(num_tokens, D, BLOCK_D, ROWS)
    x = tl.load(x_ptr + cells, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + clip * weight_stride + channels, mask=channels < D, other=0.0)
        bias = tl.load(bias_ptr + clip * bias_stride + channels, mask=channels < D, other=0.0)
        x = x * weight + bias
    store_fp8_rows(x, values_ptr + cells, scales_ptr + rows, inside, present)


@jit
def row_channels(BLOCK_D: tl.constexpr) -> tl.tensor:
    """For kernels: (1, BLOCK_D), of which a thread holds 8 at a time.

    Left to itself Triton gives it 16, which are 16 bytes of e4m3, moves values through shared memory to get
    there, and leaves half of the threads idle at the end of 3,072.
    """
    return tl.max_contiguous(tl.arange(0, BLOCK_D), 8)[None, :]


@jit
def row_cells(
    num_tokens: tl.tensor, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """For kernels launched by row_launch: a program's clip, channels, rows, which of them are present, where
    their values lie, and which of those are inside."""
    clip = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = row_channels(BLOCK_D)
    present = tokens < num_tokens
    rows = clip * num_tokens + tokens
    cells = rows[:, None] * D + channels
    return clip, channels, rows, present, cells, present[:, None] & (channels < D)


@jit
def store_fp8_rows(
    x: tl.tensor, values_ptrs: tl.tensor, scales_ptrs: tl.tensor, inside: tl.tensor, present: tl.tensor
) -> None:
    """For kernels: plain_fp8_rows of fp32 rows x, in which channels that are not inside are zero."""
    largest = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30)  # SMALLEST and LARGEST
    factor = tl.div_rn(448.0, largest)
    tl.store(values_ptrs, (x * factor[:, None]).to(values_ptrs.dtype.element_ty), mask=inside)
    tl.store(scales_ptrs, tl.div_rn(largest, 448.0), mask=present)
