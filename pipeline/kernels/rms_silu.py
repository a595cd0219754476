"""Between two causal convolutions: bias and residual in, RMS norm, SiLU, out into the next one's window.

A window is the input of a convolution over three frames: the two frames before a piece of a clip, then the
piece. The two before come from the convolution's history, which afterwards holds the last two of the window.

Shapes: T frames, H and W sides, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from pipeline.kernels.fp8_rows import row_channels
from pipeline.kernels.triton_jit import jit, tl

SMALLEST_NORM = 1e-12  # what F.normalize divides by at least
# One load of 16 bytes in bf16. With twice as many, upsample_rms_silu takes 160 registers a thread, which
# leaves room for 8 warps on a multiprocessor; so it takes 80, and rms_silu 56. Compiled for sm_90, not timed.
_VALUES_PER_THREAD = 8
_VALUES_PER_PROGRAM = 2048
_MIN_PROGRAMS = 512  # small pictures share their pixels out more finely: an H200 has 132 multiprocessors


def rms_norm(x_THWC: torch.Tensor, gamma_C: torch.Tensor) -> torch.Tensor:
    """x over its root mean square across C, times gamma, computed in at least fp32, in x's dtype."""
    return _normed(_wide(x_THWC), gamma_C).to(x_THWC.dtype)


def rms_silu(
    branch_THWC: torch.Tensor,
    bias_C: torch.Tensor,
    residual_THWC: torch.Tensor | None,
    gamma_C: torch.Tensor,
    window_THWC: torch.Tensor,
    history_2HWC: torch.Tensor,
    keep_sum: bool,
    factor_C: torch.Tensor | None = None,
) -> None:
    """SiLU of the RMS norm of branch + bias + residual, behind the history in the window: plain torch.

    window_THWC: of T + 2 frames, overwritten. history_2HWC: becomes the window's last two frames.
    keep_sum: branch becomes the sum; otherwise it is left alone. factor: in fp32, what the SiLU is multiplied
    by so that it fills the range of e4m3, which window and history then have; never beyond it.
    """
    total_THWC = _wide(branch_THWC) + bias_C
    if residual_THWC is not None:
        total_THWC += residual_THWC
    if keep_sum:
        branch_THWC.copy_(total_THWC)
    frames_THWC = F.silu(_normed(total_THWC, gamma_C))
    fill_window(frames_THWC if factor_C is None else frames_THWC * factor_C, window_THWC, history_2HWC)


def fill_window(frames_THWC: torch.Tensor, window_THWC: torch.Tensor, history_2HWC: torch.Tensor) -> None:
    """The history and then the frames become the window, whose last two frames become the history."""
    window_THWC[:2] = history_2HWC
    window_THWC[2:] = frames_THWC
    history_2HWC.copy_(window_THWC[-2:])


def fused_rms_silu(
    branch_THWC: torch.Tensor,
    *,
    bias: torch.Tensor,
    residual: torch.Tensor | None = None,
    gamma: torch.Tensor,
    window: torch.Tensor,
    history: torch.Tensor,
    keep_sum: bool,
    factor: torch.Tensor | None = None,
) -> None:
    """rms_silu in one pass over contiguous tensors.

    Moves, in values of one frame: T (branch) + T (residual) + T (kept sum) + T (window) + 6 (history).
    """
    _rms_silu_op(branch_THWC, bias, residual, gamma, window, history, keep_sum, factor)


def triton_rms_silu(
    branch_THWC: torch.Tensor,
    bias_C: torch.Tensor,
    residual_THWC: torch.Tensor | None,
    gamma_C: torch.Tensor,
    window_THWC: torch.Tensor,
    history_2HWC: torch.Tensor,
    keep_sum: bool,
    factor_C: torch.Tensor | None = None,
) -> None:
    num_frames, height, width, channels = branch_THWC.shape
    tensors = [branch_THWC, bias_C, gamma_C, window_THWC, history_2HWC]
    assert all(tensor.is_contiguous() for tensor in tensors), [tensor.stride() for tensor in tensors]
    assert window_THWC.shape == (num_frames + 2, height, width, channels), window_THWC.shape
    assert history_2HWC.shape == (2, height, width, channels), history_2HWC.shape
    if residual_THWC is not None:
        assert residual_THWC.is_contiguous(), residual_THWC.stride()
        assert residual_THWC.shape == branch_THWC.shape, residual_THWC.shape
    grid, tile = pixel_launch(height * width, channels)
    _rms_silu_kernel[grid](
        branch_THWC,
        bias_C,
        residual_THWC if residual_THWC is not None else branch_THWC,
        gamma_C,
        window_THWC,
        history_2HWC,
        factor_C,
        height * width,
        channels**0.5,
        SMALLEST_NORM,
        NUM_FRAMES=num_frames,
        C=channels,
        HAS_RESIDUAL=residual_THWC is not None,
        KEEP_SUM=keep_sum,
        **tile,
    )


_rms_silu_op = torch.library.custom_op(
    "vgbatch::rms_silu",
    triton_rms_silu,
    mutates_args=("branch_THWC", "window_THWC", "history_2HWC"),
    device_types="cuda",
)
_rms_silu_op.register_kernel("cpu")(rms_silu)


@_rms_silu_op.register_fake
def _nothing(*_: Any) -> None:
    return None


def pixel_launch(num_pixels: int, channels: int) -> tuple[tuple[int], dict[str, Any]]:
    """The grid over a frame's pixels, and a program's tile: BLOCK_C, PIXELS and num_warps.

    A program takes its pixels through all frames of the piece, so that it alone touches their history.
    """
    assert 2 * num_pixels * channels < 2**31, (num_pixels, channels)  # kernels step by frames in 32 bits
    block = 1 << (channels - 1).bit_length()
    pixels = max(1, _VALUES_PER_PROGRAM // block)
    while pixels > 1 and num_pixels < pixels * _MIN_PROGRAMS:
        pixels //= 2
    warps = max(1, pixels * block // (32 * _VALUES_PER_THREAD))
    return (-(-num_pixels // pixels),), {"BLOCK_C": block, "PIXELS": pixels, "num_warps": warps}


@jit
def _rms_silu_kernel(
    branch_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    gamma_ptr: tl.tensor,
    window_ptr: tl.tensor,
    history_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    num_pixels: tl.tensor,
    root_channels: tl.tensor,
    smallest_norm: tl.tensor,
    NUM_FRAMES: tl.constexpr,
    C: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    KEEP_SUM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PIXELS: tl.constexpr,
) -> None:
    pixels = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channels = window_channels(factor_ptr, BLOCK_C)
    inside = (pixels < num_pixels)[:, None] & (channels < C)
    cells = pixels.to(tl.int64)[:, None] * C + channels
    frame = num_pixels * C
    bias = tl.load(bias_ptr + channels, mask=channels < C, other=0.0).to(tl.float32)
    gamma = tl.load(gamma_ptr + channels, mask=channels < C, other=0.0).to(tl.float32)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + channels, mask=channels < C, other=0.0)
    older = tl.load(history_ptr + cells, mask=inside)
    newer = tl.load(history_ptr + frame + cells, mask=inside)
    tl.store(window_ptr + cells, older, mask=inside)
    tl.store(window_ptr + frame + cells, newer, mask=inside)
    window_ptr += 2 * frame
    for _ in range(NUM_FRAMES):
        total = tl.load(branch_ptr + cells, mask=inside, other=0.0).to(tl.float32) + bias
        if HAS_RESIDUAL:
            total += tl.load(residual_ptr + cells, mask=inside, other=0.0).to(tl.float32)
        if KEEP_SUM:
            tl.store(branch_ptr + cells, total, mask=inside)
        older = newer
        silu = rms_silu_rows(total, gamma, root_channels, smallest_norm)
        if factor_ptr is not None:
            silu *= factor
        newer = silu.to(older.dtype)
        tl.store(window_ptr + cells, newer, mask=inside)
        branch_ptr += frame
        residual_ptr += frame
        window_ptr += frame
    tl.debug_barrier()  # no thread may overwrite history that another has yet to read
    tl.store(history_ptr + cells, older, mask=inside)
    tl.store(history_ptr + frame + cells, newer, mask=inside)


@jit
def window_channels(factor_ptr: tl.tensor, BLOCK_C: tl.constexpr) -> tl.tensor:
    """For kernels: (1, BLOCK_C), for a window in e4m3 shared out as in fp8_rows."""
    channels = tl.arange(0, BLOCK_C)[None, :]
    if factor_ptr is not None:
        channels = row_channels(BLOCK_C)
    return channels


@jit
def rms_silu_rows(
    x: tl.tensor, gamma: tl.tensor, root_channels: tl.tensor, smallest_norm: tl.tensor
) -> tl.tensor:
    """For kernels: SiLU of the RMS norm of fp32 rows, which are zero outside of their channels."""
    norm = tl.maximum(tl.sqrt(tl.sum(x * x, axis=1)), smallest_norm)
    normed = x * (root_channels / norm)[:, None] * gamma
    return normed * tl.sigmoid(normed)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _normed(x_THWC: torch.Tensor, gamma_C: torch.Tensor) -> torch.Tensor:
    return F.normalize(x_THWC, dim=-1, eps=SMALLEST_NORM) * x_THWC.shape[-1] ** 0.5 * gamma_C
