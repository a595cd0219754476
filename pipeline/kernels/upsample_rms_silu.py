"""The end of a spatial upsampling: pixels into place, bias and shortcut in, RMS norm, SiLU, into a window.

Doubling a picture by nearest neighbours and then convolving it 3x3 equals, for each of the four pixels that
one becomes, a 2x2 convolution of the small picture (`pipeline/models/wan_vae/upsampling.py`). All four are
parts of one, padded by one on every side: pixel (2y + a, 2x + b) is in its output at (y + a, x + b), in the
quarter 2a + b of its channels.

The shortcut (of Wan2.2's decoder) repeats values: channel c of frame f, pixel (2y + a, 2x + b) of the result
is channel ((c * S + f % S) * 4 + 2a + b) // repeats of its frame f // S, pixel (y, x), where S frames of the
result come from one of the shortcut.

Shapes: T frames, H and W sides before doubling, C channels of the result, Q = 4C. The shortcut has its own T
and C.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.kernels.rms_silu import (
    SMALLEST_NORM,
    pixel_launch,
    rms_silu,
    rms_silu_rows,
    window_channels,
)
from pipeline.kernels.triton_jit import jit, tl


def upsample_rms_silu(
    quarters_THWQ: torch.Tensor,
    bias_C: torch.Tensor,
    shortcut_THWC: torch.Tensor | None,
    gamma_C: torch.Tensor,
    sum_THWC: torch.Tensor,
    window_THWC: torch.Tensor,
    history_2HWC: torch.Tensor,
    first_frame: int,
    time_factor: int,
    factor_C: torch.Tensor | None = None,
) -> None:
    """SiLU of the RMS norm of quarters + bias + shortcut, behind the history in the window: plain torch.

    quarters_THWQ: (T, H + 1, W + 1, 4C). sum_THWC: (T, 2H, 2W, C), becomes the sum. window, history, factor:
    as in rms_silu. first_frame: which of the shortcut's repeated frames the first one of T meets.
    """
    residual = None
    if shortcut_THWC is not None:
        frames = repeated(shortcut_THWC, channels=len(bias_C), time_factor=time_factor)
        residual = frames[first_frame : first_frame + len(quarters_THWQ)]
    sum_THWC.copy_(in_place(quarters_THWQ))
    rms_silu(sum_THWC, bias_C, residual, gamma_C, window_THWC, history_2HWC, True, factor_C)


def in_place(quarters_THWQ: torch.Tensor) -> torch.Tensor:
    """The pixels of (T, H + 1, W + 1, 4C) where they belong: (T, 2H, 2W, C)."""
    num_frames, rows, columns, _ = quarters_THWQ.shape
    height, width = rows - 1, columns - 1
    lines = [
        torch.stack(
            [quarters_THWQ[:, a : a + height, b : b + width].chunk(4, dim=-1)[2 * a + b] for b in range(2)],
            dim=3,
        )
        for a in range(2)
    ]
    return torch.stack(lines, dim=2).reshape(num_frames, 2 * height, 2 * width, -1)


def repeated(shortcut_THWC: torch.Tensor, *, channels: int, time_factor: int) -> torch.Tensor:
    """The shortcut at the result's size: (T * time_factor, 2H, 2W, channels)."""
    num_frames, height, width, given = shortcut_THWC.shape
    values = shortcut_THWC.repeat_interleave(channels * time_factor * 4 // given, dim=-1)
    values = values.view(num_frames, height, width, channels, time_factor, 2, 2)
    values = values.permute(0, 4, 1, 5, 2, 6, 3)  # T, S, H, 2, W, 2, C
    return values.reshape(num_frames * time_factor, 2 * height, 2 * width, channels)


def fused_upsample_rms_silu(
    quarters_THWQ: torch.Tensor,
    *,
    bias: torch.Tensor,
    shortcut: torch.Tensor | None,
    gamma: torch.Tensor,
    sums: torch.Tensor,
    window: torch.Tensor,
    history: torch.Tensor,
    first_frame: int,
    time_factor: int,
    factor: torch.Tensor | None = None,
) -> None:
    """upsample_rms_silu in one pass over contiguous tensors.

    Moves, in values of one frame of the result: T (quarters) + at most T (shortcut; a fourth of it when its
    channels are as many as the result's) + T (sums) + T (window) + 6 (history).
    """
    _upsample_rms_silu_op(
        quarters_THWQ, bias, shortcut, gamma, sums, window, history, first_frame, time_factor, factor
    )


def triton_upsample_rms_silu(
    quarters_THWQ: torch.Tensor,
    bias_C: torch.Tensor,
    shortcut_THWC: torch.Tensor | None,
    gamma_C: torch.Tensor,
    sum_THWC: torch.Tensor,
    window_THWC: torch.Tensor,
    history_2HWC: torch.Tensor,
    first_frame: int,
    time_factor: int,
    factor_C: torch.Tensor | None = None,
) -> None:
    num_frames, height, width, channels = sum_THWC.shape
    assert quarters_THWQ.shape == (num_frames, height // 2 + 1, width // 2 + 1, 4 * channels)
    assert window_THWC.shape == (num_frames + 2, height, width, channels), window_THWC.shape
    assert history_2HWC.shape == (2, height, width, channels), history_2HWC.shape
    tensors = [quarters_THWQ, bias_C, gamma_C, sum_THWC, window_THWC, history_2HWC]
    shortcut_channels = 0
    if shortcut_THWC is not None:
        tensors.append(shortcut_THWC)
        last_frame, *sides, shortcut_channels = shortcut_THWC.shape
        assert sides == [height // 2, width // 2], sides
        assert first_frame + num_frames <= last_frame * time_factor, (first_frame, num_frames, last_frame)
    assert all(tensor.is_contiguous() for tensor in tensors), [tensor.stride() for tensor in tensors]
    # The kernel steps by frames in 32 bits.
    assert max(frames[0].numel() for frames in tensors if frames.dim() == 4) < 2**30, quarters_THWQ.shape
    grid, tile = pixel_launch(height * width, channels)
    _upsample_rms_silu_kernel[grid](
        quarters_THWQ,
        bias_C,
        shortcut_THWC if shortcut_THWC is not None else quarters_THWQ,
        gamma_C,
        sum_THWC,
        window_THWC,
        history_2HWC,
        factor_C,
        height // 2,
        width // 2,
        first_frame,
        channels**0.5,
        SMALLEST_NORM,
        NUM_FRAMES=num_frames,
        C=channels,
        SHORTCUT_C=shortcut_channels,
        TIME_FACTOR=time_factor,
        **tile,
    )


_upsample_rms_silu_op = torch.library.custom_op(
    "vgbatch::upsample_rms_silu",
    triton_upsample_rms_silu,
    mutates_args=("sum_THWC", "window_THWC", "history_2HWC"),
    device_types="cuda",
)
_upsample_rms_silu_op.register_kernel("cpu")(upsample_rms_silu)


@_upsample_rms_silu_op.register_fake
def _nothing(*_: Any) -> None:
    return None


@jit
def _upsample_rms_silu_kernel(
    quarters_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    shortcut_ptr: tl.tensor,
    gamma_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    window_ptr: tl.tensor,
    history_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    first_frame: tl.tensor,
    root_channels: tl.tensor,
    smallest_norm: tl.tensor,
    NUM_FRAMES: tl.constexpr,
    C: tl.constexpr,
    SHORTCUT_C: tl.constexpr,  # 0: there is none
    TIME_FACTOR: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PIXELS: tl.constexpr,
) -> None:
    num_pixels = 4 * height * width
    pixels = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channels = window_channels(factor_ptr, BLOCK_C)
    inside = (pixels < num_pixels)[:, None] & (channels < C)
    cells = pixels.to(tl.int64)[:, None] * C + channels
    row = pixels // (2 * width)
    column = pixels % (2 * width)
    quarter = 2 * (row % 2) + column % 2
    # Row 2y + a is at y + a: half of it, rounded up. The same goes for columns.
    place = ((row + 1) // 2 * (width + 1) + (column + 1) // 2) * 4 + quarter
    parts = place.to(tl.int64)[:, None] * C + channels
    small_pixels = (row // 2 * width + column // 2).to(tl.int64)
    frame = num_pixels * C
    quarters_frame = (height + 1) * (width + 1) * 4 * C
    bias = tl.load(bias_ptr + channels, mask=channels < C, other=0.0).to(tl.float32)
    gamma = tl.load(gamma_ptr + channels, mask=channels < C, other=0.0).to(tl.float32)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + channels, mask=channels < C, other=0.0)
    older = tl.load(history_ptr + cells, mask=inside)
    newer = tl.load(history_ptr + frame + cells, mask=inside)
    tl.store(window_ptr + cells, older, mask=inside)
    tl.store(window_ptr + frame + cells, newer, mask=inside)
    window_ptr += 2 * frame
    for index in range(NUM_FRAMES):
        total = tl.load(quarters_ptr + parts, mask=inside, other=0.0).to(tl.float32) + bias
        if SHORTCUT_C > 0:
            copy = first_frame + index
            start = (copy // TIME_FACTOR).to(tl.int64) * (height * width * SHORTCUT_C)
            values = shortcut_ptr + start + small_pixels[:, None] * SHORTCUT_C
            part = (copy % TIME_FACTOR) * 4 + quarter[:, None]
            # The first two cases are the third one's, said plainly, so that loads are wide.
            if SHORTCUT_C == C:  # every part copies the same channel
                total += tl.load(values + channels, mask=inside, other=0.0).to(tl.float32)
            elif (
                SHORTCUT_C == 2 * C
            ):  # the first half of the parts copies one channel of two, the rest the other
                pair = values[:, :, None] + channels[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
                one, other = tl.split(tl.load(pair, mask=inside[:, :, None], other=0.0))
                total += tl.where(part < 2 * TIME_FACTOR, one, other).to(tl.float32)
            else:
                repeats: tl.constexpr = C * TIME_FACTOR * 4 // SHORTCUT_C
                source = (channels * TIME_FACTOR * 4 + part) // repeats
                total += tl.load(values + source, mask=inside, other=0.0).to(tl.float32)
        tl.store(sum_ptr + cells, total, mask=inside)
        older = newer
        silu = rms_silu_rows(total, gamma, root_channels, smallest_norm)
        if factor_ptr is not None:
            silu *= factor
        newer = silu.to(older.dtype)
        tl.store(window_ptr + cells, newer, mask=inside)
        quarters_ptr += quarters_frame
        sum_ptr += frame
        window_ptr += frame
    tl.debug_barrier()  # no thread may overwrite history that another has yet to read
    tl.store(history_ptr + cells, older, mask=inside)
    tl.store(history_ptr + frame + cells, newer, mask=inside)
