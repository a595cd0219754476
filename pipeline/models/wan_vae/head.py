"""The end of the decoder: residual blocks at full size, then pictures.

Shapes: T frames, H and W sides, C channels, P pixels of a cell's side.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from pipeline.models.wan_vae.blocks import gamma, residual_blocks
from pipeline.models.wan_vae.causal import CausalConv, MakeConv, StreamMemory
from pipeline.models.wan_vae.sums import Pending

_CHANNEL_MULTIPLE = 8  # tensor cores take bf16 values eight at a time


class Head:
    """decoder: a WanDecoder3d. cell: the sides of what one pixel of its result becomes."""

    def __init__(
        self, decoder: Any, *, cell: int, scale: int, memory: StreamMemory, make_conv: MakeConv
    ) -> None:
        last = decoder.up_blocks[-1]
        self.blocks = residual_blocks(last, scale=scale, memory=memory, make_conv=make_conv)
        self.gamma_C = gamma(decoder.norm_out)
        self.cell = cell
        weight, self.bias = decoder.conv_out.weight.detach(), decoder.conv_out.bias.detach()
        # Filters of zeros up to the multiple, left out again below.
        missing = -len(weight) % _CHANNEL_MULTIPLE
        padded = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, 0, 0, missing))
        padded = padded.contiguous(memory_format=torch.channels_last_3d)
        self.conv_out = CausalConv(padded, self.bias, scale=scale, memory=memory)

    def __call__(self, pending: Pending) -> torch.Tensor:
        """fp32 RGB in [0, 1], (3, T, H * P, W * P)."""
        total = self.blocks[0](pending)
        for block in self.blocks[1:]:
            total = block(total)
        return self._rgb(self.conv_out(total.pass_into(self.conv_out, self.gamma_C)))

    def _rgb(self, cells_THWC: torch.Tensor) -> torch.Tensor:
        # A cell's channels are colour, then column, then row.
        parts = (3, self.cell, self.cell)
        values_3THPWP = cells_THWC[..., : len(self.bias)].unflatten(-1, parts).permute(3, 0, 1, 5, 2, 4)
        bias_3P1P = self.bias.view(parts).transpose(1, 2)[:, :, None]
        rgb_3THPWP = torch.empty(values_3THPWP.shape, dtype=torch.float32, device=cells_THWC.device)
        torch.add(values_3THPWP, bias_3P1P[:, None, None].float(), out=rgb_3THPWP)
        rgb_3THPWP.clamp_(-1, 1).mul_(0.5).add_(0.5)
        return rgb_3THPWP.flatten(4, 5).flatten(2, 3)
