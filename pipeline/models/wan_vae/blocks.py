"""The blocks of the decoder, each from diffusers' module of the same kind.

Shapes: T frames, H and W sides, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from pipeline.kernels.rms_silu import rms_norm
from pipeline.models.wan_vae.causal import MakeConv, StreamMemory
from pipeline.models.wan_vae.sums import Pending, Sum, pointwise
from pipeline.models.wan_vae.upsampling import Upsampled, Upsampling


class ResidualBlock:
    """Norm, SiLU and convolution, twice, beside the input."""

    def __init__(self, module: Any, *, scale: int, memory: StreamMemory, make_conv: MakeConv) -> None:
        self.gamma1_C, self.gamma2_C = gamma(module.norm1), gamma(module.norm2)
        self.conv1 = make_conv(module.conv1, self.gamma1_C, scale=scale, memory=memory)
        self.conv2 = make_conv(module.conv2, self.gamma2_C, scale=scale, memory=memory)
        self.shortcut = None if module.in_dim == module.out_dim else module.conv_shortcut

    def __call__(self, pending: Pending) -> Sum:
        return self.finish(*self.enter(pending))

    def enter(self, pending: Pending) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's input, and its first convolution's window."""
        return pending.enter(self.conv1, self.gamma1_C)

    def finish(self, x_THWC: torch.Tensor, window_THWC: torch.Tensor) -> Sum:
        if self.shortcut is not None:
            x_THWC = pointwise(x_THWC, self.shortcut.weight, self.shortcut.bias)
        # Unnamed between the two: the first one's result must be gone before the second makes its own.
        window_THWC = Sum(self.conv1(window_THWC), self.conv1.bias).pass_into(self.conv2, self.gamma2_C)
        return Sum(self.conv2(window_THWC), self.conv2.bias, x_THWC)


class Attention:
    """Within each frame, one head over its pixels."""

    def __init__(self, module: Any) -> None:
        self.gamma_C = gamma(module.norm)
        self.to_qkv, self.proj = module.to_qkv, module.proj

    def __call__(self, pending: Sum) -> Sum:
        x_THWC = pending.total()
        qkv_THWC = pointwise(rms_norm(x_THWC, self.gamma_C), self.to_qkv.weight, self.to_qkv.bias)
        q_T1NC, k_T1NC, v_T1NC = qkv_THWC.flatten(1, 2).unsqueeze(1).chunk(3, dim=-1)
        mixed_T1NC = F.scaled_dot_product_attention(q_T1NC, k_T1NC, v_T1NC)
        return Sum(pointwise(mixed_T1NC.reshape(x_THWC.shape), self.proj.weight), self.proj.bias, x_THWC)


class MiddleBlock:
    def __init__(self, module: Any, *, memory: StreamMemory, make_conv: MakeConv) -> None:
        self.first, *others = residual_blocks(module, scale=1, memory=memory, make_conv=make_conv)
        self.others = list(zip(map(Attention, module.attentions), others, strict=True))

    def __call__(self, pending: Pending) -> Sum:
        total = self.first(pending)
        for attention, block in self.others:
            total = block(attention(total))
        return total


class UpBlock:
    """Residual blocks, then twice the size."""

    def __init__(
        self, module: Any, *, is_residual: bool, scale: int, memory: StreamMemory, make_conv: MakeConv
    ) -> None:
        self.first, *self.others = residual_blocks(module, scale=scale, memory=memory, make_conv=make_conv)
        resample = module.upsampler if is_residual else module.upsamplers[0]
        duplicate = module.avg_shortcut if is_residual else None
        self.upsampling = Upsampling(resample, duplicate, scale=scale, memory=memory)

    def __call__(self, pending: Pending, *, is_first: bool, frames_at_once: int) -> Iterator[Upsampled]:
        """At most frames_at_once frames at a time. is_first: of the clip's first latent frame, alone."""
        block_input_THWC, window_THWC = self.first.enter(pending)
        total = self.first.finish(block_input_THWC, window_THWC)
        for block in self.others:
            total = block(total)
        frames_THWC = self.upsampling.in_time(total, is_first=is_first)
        del total  # its residual would take room while the next blocks, the larger ones, run
        for start in range(0, len(frames_THWC), frames_at_once):
            yield self.upsampling.piece(
                frames_THWC[start : start + frames_at_once],
                start=start,
                block_input_THWC=block_input_THWC,
                is_first=is_first,
            )


def residual_blocks(
    module: Any, *, scale: int, memory: StreamMemory, make_conv: MakeConv
) -> list[ResidualBlock]:
    return [ResidualBlock(block, scale=scale, memory=memory, make_conv=make_conv) for block in module.resnets]


def gamma(norm: Any) -> torch.Tensor:
    """A WanRMS_norm's weight: (C,)."""
    return norm.gamma.detach().flatten()
