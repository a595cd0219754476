"""Softmax attention without a mask.

Shapes: B clips, N query tokens, M key tokens, H heads of K channels, D = H * K.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attention(q_BNHK: torch.Tensor, k_BMHK: torch.Tensor, v_BMHK: torch.Tensor) -> torch.Tensor:
    """Every query attends to every key; scores are scaled by K**-0.5. Returns (B, N, D)."""
    q_BHNK, k_BHMK, v_BHMK = (tensor.transpose(1, 2) for tensor in (q_BNHK, k_BMHK, v_BMHK))
    return F.scaled_dot_product_attention(q_BHNK, k_BHMK, v_BHMK).transpose(1, 2).flatten(2)
