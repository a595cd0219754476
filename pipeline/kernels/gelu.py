"""The activation between the two linears of a feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form, in x's dtype."""
    return F.gelu(x, approximate="tanh")
