"""A convolution over three frames of 8-bit floats: inputs and weights in e4m3, summed in fp32.

As a matrix product whose left side is never written down: for each of the 27 taps a tile of pixels is read
where that tap sees it, by the tensor memory accelerator, which gives zeros for what lies beyond a frame's
sides. Channels are the innermost axis of both sides, as tensor cores want 8-bit operands.

Hopper's tensor cores are said to add e4m3 products with 13 fractional bits. In a model of that, sums of
27 * 1,024 products are off by 0.5 %, where rounding the factors to e4m3 costs 3.8 %. So nothing is handed
over to fp32 on the way, which would take twice the registers.

Shapes: T frames, H and W sides, C channels, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from pipeline.kernels.fp8_rows import plain_fp8_rows
from pipeline.kernels.triton_jit import TensorDescriptor, jit, tl

# A program's tile of pixels and of outputs, and channels at a time: 48 KB a stage. Compiled for sm_90: 174
# registers a thread, no spills, the largest e4m3 instruction; not timed.
_ROWS, _COLUMNS = 8, 16
_MOST_OUTPUTS = 256
_LEAST_CHANNELS, _MOST_CHANNELS = 32, 128
_WARPS, _STAGES = 8, 4


class Fp8Kernel(NamedTuple):
    """Weights are values times scales. values: in e4m3; each tap's (O, C) lie together in memory."""

    values_OC333: torch.Tensor
    scales_O: torch.Tensor


def fp8_kernel(weight_OC333: torch.Tensor, *, input_scales: torch.Tensor) -> Fp8Kernel:
    """For inputs that were divided by input_scales, (C,), before they were rounded.

    Weights take up those scales before they are rounded themselves.
    """
    weight_OC333 = weight_OC333.float() * input_scales.view(-1, 1, 1, 1)
    rows = plain_fp8_rows(weight_OC333.flatten(1)[None])
    taps_333OC = rows.values_BND.view(weight_OC333.shape).permute(2, 3, 4, 0, 1).contiguous()
    return Fp8Kernel(taps_333OC.permute(3, 4, 0, 1, 2), rows.scales_BN1.flatten())


def fp8_conv(window_THWC: torch.Tensor, *, kernel: Fp8Kernel, dtype: torch.dtype) -> torch.Tensor:
    """(T - 2, H, W, O) in dtype, without bias. Sides are padded with zeros, time is not.

    window: e4m3, contiguous. C and O are multiples of 16 on a card.
    """
    return _fp8_conv_op(window_THWC, *kernel, dtype)


def plain_fp8_conv(
    window_THWC: torch.Tensor, values_OC333: torch.Tensor, scales_O: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The same products in fp32, frame by frame: on CPUs conv3d takes up to 11 times as long."""
    num_frames = len(window_THWC) - 2
    frames_TCHW = window_THWC.float().permute(0, 3, 1, 2)
    weight_OC333 = values_OC333.float()
    sums_TOHW, *others = [
        F.conv2d(frames_TCHW[tap : tap + num_frames], weight_OC333[:, :, tap], padding=1) for tap in range(3)
    ]
    for other_TOHW in others:
        sums_TOHW += other_TOHW
    return (sums_TOHW.permute(0, 2, 3, 1) * scales_O).to(dtype)


def triton_fp8_conv(
    window_THWC: torch.Tensor, values_OC333: torch.Tensor, scales_O: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    num_frames, height, width, channels = window_THWC.shape
    outputs = len(scales_O)
    taps_NOC = values_OC333.permute(2, 3, 4, 0, 1).flatten(0, 2)
    assert window_THWC.is_contiguous(), window_THWC.stride()
    assert taps_NOC.is_contiguous(), taps_NOC.stride()
    assert taps_NOC.shape == (27, outputs, channels), taps_NOC.shape
    out_THWO = window_THWC.new_empty(num_frames - 2, height, width, outputs, dtype=dtype)
    block_c = min(_MOST_CHANNELS, max(_LEAST_CHANNELS, _power_of_two(channels)))
    block_o = min(_MOST_OUTPUTS, max(16, _power_of_two(outputs)))
    tiles = -(-height // _ROWS) * -(-width // _COLUMNS) * -(-outputs // block_o)
    _fp8_conv_kernel[(num_frames - 2) * tiles,](
        TensorDescriptor.from_tensor(window_THWC, [1, _ROWS, _COLUMNS, block_c]),
        TensorDescriptor.from_tensor(taps_NOC, [1, block_o, block_c]),
        scales_O,
        out_THWO,
        height,
        width,
        OUTPUTS=outputs,
        CHANNELS=channels,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        BLOCK_O=block_o,
        BLOCK_C=block_c,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out_THWO


_fp8_conv_op = torch.library.custom_op(
    "vgbatch::fp8_conv", triton_fp8_conv, mutates_args=(), device_types="cuda"
)
_fp8_conv_op.register_kernel("cpu", plain_fp8_conv)


@_fp8_conv_op.register_fake
def _convolved(
    window_THWC: torch.Tensor, _: torch.Tensor, scales_O: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    num_frames, height, width = window_THWC.shape[:3]
    return window_THWC.new_empty(num_frames - 2, height, width, len(scales_O), dtype=dtype)


def _power_of_two(number: int) -> int:
    """The next that is not smaller."""
    return 1 << (number - 1).bit_length()


@jit
def _fp8_conv_kernel(
    window: tl.tensor,
    weight: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """window, weight: descriptors of (T, H, W, C) and (27, O, C)."""
    # Outputs first, then along the rows: what runs at once reads the same pixels and the same weights.
    num_blocks_o: tl.constexpr = (OUTPUTS + BLOCK_O - 1) // BLOCK_O
    num_blocks_c: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    tile = tl.program_id(0)
    first_o = tile % num_blocks_o * BLOCK_O
    tile = tile // num_blocks_o
    tiles_x = tl.cdiv(width, COLUMNS)
    tiles_y = tl.cdiv(height, ROWS)
    left = tile % tiles_x * COLUMNS
    top = tile // tiles_x % tiles_y * ROWS
    frame = tile // tiles_x // tiles_y
    sums = tl.zeros([ROWS * COLUMNS, BLOCK_O], tl.float32)
    for step in range(27 * num_blocks_c):
        tap = step // num_blocks_c
        first_c = step % num_blocks_c * BLOCK_C
        place = [frame + tap // 9, top + tap // 3 % 3 - 1, left + tap % 3 - 1, first_c]
        pixels = window.load(place).reshape(ROWS * COLUMNS, BLOCK_C)
        filters = weight.load([tap, first_o, first_c]).reshape(BLOCK_O, BLOCK_C)
        sums = tl.dot(pixels, filters.T, sums)
    outputs = first_o + tl.arange(0, BLOCK_O)
    cells = tl.arange(0, ROWS * COLUMNS)
    y = top + cells // COLUMNS
    x = left + cells % COLUMNS
    inside = ((y < height) & (x < width))[:, None] & (outputs < OUTPUTS)[None, :]
    pixel = (frame * height + y).to(tl.int64) * width + x
    scales = tl.load(scales_ptr + outputs, mask=outputs < OUTPUTS, other=0.0)
    result = (sums * scales[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pixel[:, None] * OUTPUTS + outputs[None, :], result, mask=inside)
