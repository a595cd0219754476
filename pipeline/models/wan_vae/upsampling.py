"""Between two blocks of the decoder: twice the frames, where time is upsampled, and twice the sides.

The sides: nearest-neighbour doubling and a 3x3 convolution. Each of the four pixels that one becomes sees
only 2x2 pixels of the small picture, so its kernel is 2x2, of sums of the 3x3 one's rows and columns: 16
products instead of 36 for four values, 7.6 % of the decoder's arithmetic. One convolution makes all four, as
four times the channels: four convolutions would read the picture four times, and torch cannot let them write
between each other's pixels without copying. Padded by one all round it makes a row and a column too many, 1 %
at 96x168. Putting the pixels into place costs nothing, as the op that reads them moves each once in any case.

Shapes: T frames, H and W sides before doubling, C channels, O channels of the result, Q = 4 * O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from pipeline.kernels.upsample_rms_silu import fused_upsample_rms_silu
from pipeline.models.wan_vae.causal import CausalConv, StreamMemory
from pipeline.models.wan_vae.sums import Sum


def folded(kernel_OC33: torch.Tensor) -> torch.Tensor:
    """Four 2x2 kernels in one, channels-last: (4 * O, C, 2, 2); pixel (2y + a, 2x + b) is from part 2a + b.

    Summed in fp32 and rounded once.
    """
    rows = torch.stack(_pairs(kernel_OC33.to(torch.promote_types(kernel_OC33.dtype, torch.float32)), dim=2))
    quarters = torch.stack(_pairs(rows, dim=4), dim=1)  # 2, 2, O, C, 2, 2
    return quarters.flatten(0, 2).to(kernel_OC33.dtype).contiguous(memory_format=torch.channels_last)


def _pairs(kernel: torch.Tensor, *, dim: int) -> list[torch.Tensor]:
    """What the upper (or left) and the lower (or right) of two pixels see of two small ones."""
    before, here, after = kernel.split(1, dim=dim)
    return [torch.cat([before, here + after], dim=dim), torch.cat([before + here, after], dim=dim)]


@dataclass(frozen=True)
class Upsampled:
    """Frames whose sides are still to be doubled. shortcut: from it the op repeats values, see there.

    first_frame: of the repeated shortcut, that belongs to the first of T.
    """

    frames_THWC: torch.Tensor
    kernel_QC22: torch.Tensor
    bias_O: torch.Tensor
    shortcut_THWC: torch.Tensor | None
    first_frame: int
    time_factor: int

    def enter(self, conv: CausalConv, gamma_O: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As Pending says."""
        quarters_TQHW = F.conv2d(self.frames_THWC.permute(0, 3, 1, 2), self.kernel_QC22, padding=1)
        num_frames, height, width, _ = self.frames_THWC.shape
        sums_THWO = self.frames_THWC.new_empty(num_frames, 2 * height, 2 * width, len(self.bias_O))
        window_THWO = conv.window(num_frames)
        fused_upsample_rms_silu(
            quarters_TQHW.permute(0, 2, 3, 1),
            bias=self.bias_O,
            shortcut=self.shortcut_THWC,
            gamma=gamma_O,
            sums=sums_THWO,
            window=window_THWO,
            history=conv.history_2HWC,
            first_frame=self.first_frame,
            time_factor=self.time_factor,
            factor=conv.factor_C,
        )
        return sums_THWO, window_THWO


class Upsampling:
    """A WanResample of the decoder, with the DupUp3D beside it in Wan2.2's."""

    def __init__(self, resample: Any, duplicate: Any, *, scale: int, memory: StreamMemory) -> None:
        spatial = resample.resample[1]
        self.kernel_QC22 = folded(spatial.weight.detach())
        self.bias_O = spatial.bias.detach()
        self.radius = spatial.weight.shape[-1] // 2  # in pixels of the doubled picture
        self.time_conv = (
            CausalConv.of(resample.time_conv, scale=scale, memory=memory)
            if resample.mode == "upsample3d"
            else None
        )
        self.time_factor = 1 if self.time_conv is None else 2
        self.has_shortcut = duplicate is not None
        assert duplicate is None or (duplicate.factor_t, duplicate.factor_s) == (self.time_factor, 2)

    def in_time(self, pending: Sum, *, is_first: bool) -> torch.Tensor:
        """The frames whose sides are doubled next. A clip's first stays one, and no later one sees it."""
        if self.time_conv is None or is_first:
            return pending.total()
        return _doubled(pending, self.time_conv)

    def piece(
        self, frames_THWC: torch.Tensor, *, start: int, block_input_THWC: torch.Tensor, is_first: bool
    ) -> Upsampled:
        """Some of the frames, of which the first is number `start`."""
        return Upsampled(
            frames_THWC,
            self.kernel_QC22,
            self.bias_O,
            block_input_THWC if self.has_shortcut else None,
            # A clip's first frame is the last of the copies that the shortcut would make of it.
            start + self.time_factor - 1 if is_first else start,
            self.time_factor,
        )


def _doubled(pending: Sum, time_conv: CausalConv) -> torch.Tensor:
    """(2 * T, H, W, C): of each frame's 2C values the first half is one frame, the second the next."""
    num_frames, height, width, channels = pending.branch_THWC.shape
    window_THWC = time_conv.window(num_frames)
    window_THWC[:2] = time_conv.history_2HWC
    pending.total(window_THWC[2:])
    time_conv.history_2HWC.copy_(window_THWC[-2:])
    pairs_TPHWC = time_conv(window_THWC).unflatten(-1, (2, channels)).permute(0, 3, 1, 2, 4)
    frames_TPHWC = window_THWC.new_empty(num_frames, 2, height, width, channels)
    torch.add(pairs_TPHWC, time_conv.bias.view(2, 1, 1, channels), out=frames_TPHWC)
    return frames_TPHWC.flatten(0, 1)
