"""Values between two layers that are still a sum to be made: the op that reads them makes it on its way.

torch adds a convolution's bias in a pass of its own, and the residual in another; here both ride along with
the norm, and the normed values go straight into the next convolution's window.

Shapes: T frames, H and W sides, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from pipeline.kernels.rms_silu import fused_rms_silu
from pipeline.models.wan_vae.causal import CausalConv


class Pending(Protocol):
    """What a block of the decoder is given."""

    def enter(self, conv: CausalConv, gamma_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum, and the convolution's window, filled with the SiLU of the sum's RMS norm. Once only."""


@dataclass(frozen=True)
class Sum:
    """branch + bias, plus the residual where there is one."""

    branch_THWC: torch.Tensor
    bias_C: torch.Tensor
    residual_THWC: torch.Tensor | None = None

    def enter(self, conv: CausalConv, gamma_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As Pending says; the sum takes the branch's place."""
        return self.branch_THWC, self._fill_window(conv, gamma_C, keep_sum=True)

    def pass_into(self, conv: CausalConv, gamma_C: torch.Tensor) -> torch.Tensor:
        """The window alone, where nothing else needs the sum."""
        return self._fill_window(conv, gamma_C, keep_sum=False)

    def total(self, out_THWC: torch.Tensor | None = None) -> torch.Tensor:
        """The plain sum, in out or in the branch's place."""
        out_THWC = self.branch_THWC if out_THWC is None else out_THWC
        torch.add(self.branch_THWC, self.bias_C, out=out_THWC)
        return out_THWC if self.residual_THWC is None else out_THWC.add_(self.residual_THWC)

    def _fill_window(self, conv: CausalConv, gamma_C: torch.Tensor, *, keep_sum: bool) -> torch.Tensor:
        window_THWC = conv.window(len(self.branch_THWC))
        fused_rms_silu(
            self.branch_THWC,
            bias=self.bias_C,
            residual=self.residual_THWC,
            gamma=gamma_C,
            window=window_THWC,
            history=conv.history_2HWC,
            keep_sum=keep_sum,
            factor=conv.factor_C,
        )
        return window_THWC


def pointwise(x_THWC: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A convolution of single pixels. weight: (O, C) and then any number of ones."""
    # Of two dimensions: then torch lets the matrix product add the bias.
    return F.linear(x_THWC.flatten(0, 2), weight.flatten(1), bias).unflatten(0, x_THWC.shape[:3])
