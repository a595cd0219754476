"""The residual stream takes in a branch's output through a gate.

Shapes: B clips, N tokens, D channels.
"""

from __future__ import annotations

import torch


def gated_residual(x_BND: torch.Tensor, branch_BND: torch.Tensor, *, gate: torch.Tensor) -> torch.Tensor:
    """x + branch * gate, summed in fp32, in x's dtype. gate: fp32, broadcastable to x."""
    return (x_BND.float() + branch_BND.float() * gate).to(x_BND.dtype)
