"""The activation between two 8-bit linears: GELU, then the whole row in e4m3 with its scale.

Shapes: B clips, N tokens, F channels.
"""

from __future__ import annotations

import torch

from pipeline.kernels.fp8_rows import Fp8Rows, empty_rows, plain_fp8_rows, row_cells, store_fp8_rows
from pipeline.kernels.gelu import gelu
from pipeline.kernels.rows import row_launch
from pipeline.kernels.triton_jit import jit, tl


def gelu_fp8(x_BNF: torch.Tensor) -> Fp8Rows:
    """gelu of x, contiguous. Moves B * N * F values of x's dtype and as many of a byte.

    A row of 14,336 stays in the registers of 8 warps until its largest value is known.
    """
    return Fp8Rows(*_gelu_fp8_op(x_BNF))


def plain_gelu_fp8(x_BNF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return plain_fp8_rows(gelu(x_BNF.float()))


def triton_gelu_fp8(x_BNF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert x_BNF.is_contiguous()
    _, tokens, channels = x_BNF.shape
    out = empty_rows(x_BNF)
    grid, tile = row_launch(x_BNF, channels=channels)
    # Half as many warps: 14,336 values are then seven whole loads, and no thread waits.
    tile["num_warps"] = max(1, tile["num_warps"] // 2)
    _gelu_fp8_kernel[grid](x_BNF, *out, tokens, F=channels, **tile)
    return out


_gelu_fp8_op = torch.library.custom_op(
    "vgbatch::gelu_fp8", triton_gelu_fp8, mutates_args=(), device_types="cuda"
)
_gelu_fp8_op.register_kernel("cpu", plain_gelu_fp8)


@_gelu_fp8_op.register_fake
def _rows_of_x(x_BNF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_rows(x_BNF)


@jit
def _gelu_fp8_kernel(
    x_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_tokens: tl.tensor,
    F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    _, _, rows, present, cells, inside = row_cells(num_tokens, F, BLOCK_D, ROWS)
    x = tl.load(x_ptr + cells, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    # (1 + tanh(z)) / 2 is 1 / (1 + exp(-2z)), here a root squared, as a division takes more instructions. The
    # constants are -2 * log2(e) * sqrt(2 / pi), alone and times 0.044715.
    power = x * (-2.3022082 - 0.10294324 * x * x)
    root = tl.rsqrt(1.0 + tl.exp2(power))
    store_fp8_rows(x * root * root, values_ptr + cells, scales_ptr + rows, inside, present)
