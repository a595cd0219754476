"""Queries and keys of attention: RMS norm across all heads, then rotary position embedding.

Shapes: B clips, N tokens, D channels, H heads of K channels (D = H * K), R = K / 2 rotated pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Rope = tuple[torch.Tensor, torch.Tensor]  # cos_N1R, sin_N1R in fp32


def qk_norm(x_BND: torch.Tensor, *, weight: torch.Tensor, eps: float, num_heads: int) -> torch.Tensor:
    """x over its root mean square across D, times weight, as (B, N, H, K) in x's dtype."""
    return _normed(x_BND, weight, eps).to(x_BND.dtype).unflatten(-1, (num_heads, -1))


def qk_norm_rope(
    x_BND: torch.Tensor, *, weight: torch.Tensor, eps: float, num_heads: int, rope: Rope
) -> torch.Tensor:
    """As qk_norm, with each pair of neighbouring channels rotated by its token's angle, rounded once."""
    x_BNHK = _normed(x_BND, weight, eps).unflatten(-1, (num_heads, -1))
    cos_N1R, sin_N1R = rope
    even_BNHR, odd_BNHR = x_BNHK[..., 0::2], x_BNHK[..., 1::2]
    rotated = (even_BNHR * cos_N1R - odd_BNHR * sin_N1R, even_BNHR * sin_N1R + odd_BNHR * cos_N1R)
    return torch.stack(rotated, dim=-1).flatten(-2).to(x_BND.dtype)


def _normed(x_BND: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x_BND.float(), x_BND.shape[-1:], weight.float(), eps)
