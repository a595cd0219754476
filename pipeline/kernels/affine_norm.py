"""Layer norm, then times a weight, plus a bias: each block's modulated norms and its affine one.

Shapes: B clips, N tokens, D channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def affine_norm(x_BND: torch.Tensor, *, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer norm over D in fp32, times weight, plus bias, in x's dtype.

    weight, bias: fp32, broadcastable to x; for a modulated norm weight is 1 + scale and bias is shift.
    """
    normed_BND = F.layer_norm(x_BND.float(), x_BND.shape[-1:], eps=eps)
    return (normed_BND * weight + bias).to(x_BND.dtype)
