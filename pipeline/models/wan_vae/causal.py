"""Convolutions that look back two frames, and what they remember from one piece of a clip to the next.

Everything is channels-last: a tensor (T, H, W, C) is, unmoved, what a convolution over (1, C, T, H, W) in
torch's channels_last_3d format reads and writes.

Shapes: T frames, H and W sides, C channels, O channels of a convolution's result.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

# A convolution of more values than 32 bits can count leaves cuDNN's fast kernels.
_MOST_VALUES = 2**31


def channels_last(convolution: Any) -> torch.Tensor:
    """The weight of a Conv3d, which it holds channels-last from now on: the values lie once in memory."""
    weight = convolution.weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last_3d)
    return weight.detach()


def convolved(window_THWC: torch.Tensor, weight_OC3KK: torch.Tensor) -> torch.Tensor:
    """A convolution over three frames, without bias: (T - 2, H, W, O). Sides are padded, time is not."""
    conv = in_one if window_THWC.is_cuda else frame_by_frame
    return conv(window_THWC, weight_OC3KK, padding=weight_OC3KK.shape[-1] // 2)


def in_one(window_THWC: torch.Tensor, weight_OC3KK: torch.Tensor, *, padding: int) -> torch.Tensor:
    frames_1CTHW = window_THWC[None].permute(0, 4, 1, 2, 3)
    result_1OTHW = F.conv3d(frames_1CTHW, weight_OC3KK, padding=(0, padding, padding))
    return result_1OTHW.permute(0, 2, 3, 4, 1)[0]


def frame_by_frame(window_THWC: torch.Tensor, weight_OC3KK: torch.Tensor, *, padding: int) -> torch.Tensor:
    """For CPUs: of a single clip torch's conv3d takes up to 11 times as long as this."""
    num_frames = len(window_THWC) - 2
    frames_TCHW = window_THWC.permute(0, 3, 1, 2)
    result_TOHW, *others = (
        F.conv2d(frames_TCHW[tap : tap + num_frames], weight_OC3KK[:, :, tap], padding=padding)
        for tap in range(3)
    )
    for other_TOHW in others:
        result_TOHW += other_TOHW
    return result_TOHW.permute(0, 2, 3, 1)


class CausalConv:
    """A convolution with the last two frames it was given. What reads its result adds its bias.

    scale: sides of its frames over those of the latents. Its window and history have its weight's dtype.
    """

    factor_C: torch.Tensor | None = None  # what its normed input is multiplied by on its way into the window

    def __init__(
        self, weight_OC3KK: torch.Tensor, bias_O: torch.Tensor, *, scale: int, memory: StreamMemory
    ) -> None:
        self.weight = weight_OC3KK
        self.bias = bias_O
        self.scale = scale
        self.history_2HWC = weight_OC3KK.new_empty(0)
        self._memory = memory
        memory.convs.append(self)

    @classmethod
    def of(cls, module: Any, *, scale: int, memory: StreamMemory) -> CausalConv:
        """module: a WanCausalConv3d over three frames."""
        return cls(channels_last(module), module.bias.detach(), scale=scale, memory=memory)

    @property
    def radius(self) -> int:
        """How far it sees to each side, in pixels of its frames."""
        return self.weight.shape[-1] // 2

    def window(self, num_frames: int) -> torch.Tensor:
        """Where its next input goes, behind its history: (num_frames + 2, H, W, C), not filled yet."""
        return self._memory.window(num_frames + 2, self.history_2HWC)

    def __call__(self, window_THWC: torch.Tensor) -> torch.Tensor:
        return convolved(window_THWC, self.weight)


class MakeConv(Protocol):
    """Makes a residual block's convolution of a diffusers module, behind a norm whose weight is gamma."""

    def __call__(
        self, module: Any, gamma_C: torch.Tensor, *, scale: int, memory: StreamMemory
    ) -> CausalConv: ...


def plain_conv(module: Any, gamma_C: torch.Tensor, *, scale: int, memory: StreamMemory) -> CausalConv:
    """A MakeConv: whatever its input is."""
    return CausalConv.of(module, scale=scale, memory=memory)


class StreamMemory:
    """The history of every convolution of a decoder's part, and one window, which takes their inputs in turn.

    Laid out once for each shape, and used again by the next clip of that shape. A window of its own for each
    convolution would save two of the six history frames that are moved for each input, and take a half more
    memory with one frame at a time, and three times as much with four.
    """

    def __init__(self) -> None:
        self.convs: list[CausalConv] = []
        self.frames_at_once = 0
        self._window = torch.empty(0)
        self._layout: tuple[int, int, int] | None = None

    def start(self, *, height: int, width: int, frames_at_once: int) -> None:
        """Forget the last clip. height, width: of the latents of the next."""
        layout = (height, width, frames_at_once)
        if layout == self._layout:
            for conv in self.convs:
                conv.history_2HWC.zero_()
            return
        self._layout = None
        self._window = self._window.new_empty(0)
        for conv in self.convs:  # all of the old ones go before the first new one comes
            conv.history_2HWC = conv.weight.new_empty(0)
        for conv in self.convs:
            sides = height * conv.scale, width * conv.scale
            conv.history_2HWC = conv.weight.new_zeros(2, *sides, conv.weight.shape[1])
        self._window = self.convs[0].weight.new_empty(
            (frames_at_once + 2) * self._widest_frame_bytes(height, width), dtype=torch.uint8
        )
        self._layout, self.frames_at_once = layout, frames_at_once

    def window(self, num_frames: int, like_2HWC: torch.Tensor) -> torch.Tensor:
        """Of so many frames like those."""
        num_bytes = num_frames * like_2HWC[0].nbytes
        return self._window[:num_bytes].view(like_2HWC.dtype).view(num_frames, *like_2HWC.shape[1:])

    def needed_bytes(self, *, height: int, width: int, frames_at_once: int) -> int:
        """For a clip of these latents, frames_at_once through each layer. In proportion to height * width.

        Beside histories and window there are at most 3.4 of the widest frames for each frame at once (counted
        for Wan2.2 at 1344x768); we reckon with 4, for what convolutions need to work.
        """
        histories = 2 * sum(_frame_bytes(conv, height, width) for conv in self.convs)
        windows = (frames_at_once + 2) * self._widest_frame_bytes(height, width)
        results = 4 * frames_at_once * self._widest_frame(height, width) * self.convs[0].bias.element_size()
        return histories + windows + results

    def is_within_32_bits(self, *, height: int, width: int, frames_at_once: int) -> bool:
        """Whether 32 bits can count the values of every convolution's input."""
        return (frames_at_once + 2) * self._widest_frame(height, width) < _MOST_VALUES

    def _widest_frame(self, height: int, width: int) -> int:
        return max(_frame_values(conv, height, width) for conv in self.convs)

    def _widest_frame_bytes(self, height: int, width: int) -> int:
        return max(_frame_bytes(conv, height, width) for conv in self.convs)


def _frame_values(conv: CausalConv, height: int, width: int) -> int:
    return height * width * conv.scale**2 * conv.weight.shape[1]


def _frame_bytes(conv: CausalConv, height: int, width: int) -> int:
    return _frame_values(conv, height, width) * conv.weight.element_size()
