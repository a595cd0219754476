"""A linear layer of 8-bit floats: rows and weights in e4m3, each with a scale of its own, summed in fp32.

Shapes: B clips, N tokens, I and O channels in and out.
"""

from __future__ import annotations

import torch

from pipeline.kernels.fp8_rows import Fp8Rows, plain_fp8_rows

# Hopper's tensor cores add e4m3 products in about 14 bits. Without fast accumulation they hand their sums to
# fp32 every 128 products, which takes time. Rounding to e4m3 leaves each factor 4 bits; that 14,336 products
# added so add less than a tenth to that error is what tests/test_pipeline_on_card_fp8.py holds them to.
FAST_ACCUMULATION = True

# Where few rows meet long sums cuBLAS shares a sum out, for which it has no kernel that knows rows' scales.
# They are then multiplied in a pass of their own; of so few rows it costs little.
_NO_KERNEL = "CUBLAS_STATUS_NOT_SUPPORTED"


def fp8_weight(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, I) in e4m3 and (1, O) scales of its rows."""
    values_1OI, scales_1O1 = plain_fp8_rows(weight_OI[None])
    return values_1OI[0], scales_1O1[..., 0]


def fp8_linear(
    rows: Fp8Rows, *, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """(B, N, O) in the bias's dtype. weight, scales: of fp8_weight.

    On a card the dtype is bfloat16, and I and O are multiples of 16.
    """
    return _fp8_linear_op(*rows, weight, scales, bias)


def plain_fp8_linear(
    x_BNI: torch.Tensor,
    x_scales_BN1: torch.Tensor,
    weight_OI: torch.Tensor,
    scales_1O: torch.Tensor,
    bias_O: torch.Tensor,
) -> torch.Tensor:
    """The same products in fp32."""
    products_BNO = x_BNI.float() @ weight_OI.float().t()
    return (products_BNO * x_scales_BN1 * scales_1O + bias_O).to(bias_O.dtype)


def cuda_fp8_linear(
    x_BNI: torch.Tensor,
    x_scales_BN1: torch.Tensor,
    weight_OI: torch.Tensor,
    scales_1O: torch.Tensor,
    bias_O: torch.Tensor,
) -> torch.Tensor:
    x_MI, x_scales_M1, weight_IO = x_BNI.flatten(0, 1), x_scales_BN1.flatten(0, 1), weight_OI.t()
    try:
        out_MO = torch._scaled_mm(
            x_MI,
            weight_IO,
            scale_a=x_scales_M1,
            scale_b=scales_1O,
            bias=bias_O,
            out_dtype=bias_O.dtype,
            use_fast_accum=FAST_ACCUMULATION,
        )
    except RuntimeError as error:
        if _NO_KERNEL not in str(error):
            raise
        one = x_scales_M1.new_ones(())
        products_MO = torch._scaled_mm(
            x_MI,
            weight_IO,
            scale_a=one,
            scale_b=one,
            out_dtype=torch.float32,
            use_fast_accum=FAST_ACCUMULATION,
        )
        out_MO = (products_MO * x_scales_M1 * scales_1O + bias_O).to(bias_O.dtype)
    return out_MO.unflatten(0, x_BNI.shape[:2])


_fp8_linear_op = torch.library.custom_op(
    "vgbatch::fp8_linear", cuda_fp8_linear, mutates_args=(), device_types="cuda"
)
_fp8_linear_op.register_kernel("cpu", plain_fp8_linear)


@_fp8_linear_op.register_fake
def _products(
    x_BNI: torch.Tensor, _: torch.Tensor, weight_OI: torch.Tensor, __: torch.Tensor, bias_O: torch.Tensor
) -> torch.Tensor:
    return bias_O.new_empty(*x_BNI.shape[:2], weight_OI.shape[0])
