"""Softmax attention without a mask over e4m3 queries, keys and values: FlashAttention-3's, for Hopper.

Shapes: B clips, N tokens, D channels, H heads of K channels (D = H * K).
"""

from __future__ import annotations

import torch

from pipeline.kernels.attention import flash3_forward
from pipeline.kernels.fp8_rows import to_e4m3

_LARGEST_WEIGHT = 256.0  # e4m3 stands for 1 as this among softmax's weights, as in FlashAttention-3


def fp8_attention(qkv_BN3D: torch.Tensor, *, score_scales: torch.Tensor) -> torch.Tensor:
    """(B, N, D): every query attends to every key. qkv: as in Fp8Qkv, contiguous. score_scales: (H,), fp32.

    On a card in bfloat16, and K is a multiple of 16; on the CPU in fp32.
    """
    num_heads = len(score_scales)
    qkv_BNHK = (part.unflatten(-1, (num_heads, -1)) for part in qkv_BN3D.chunk(3, dim=-1))
    attend = _flash3 if qkv_BN3D.is_cuda else plain_fp8_attention
    return attend(*qkv_BNHK, score_scales_H=score_scales).flatten(2)


def plain_fp8_attention(
    q_BNHK: torch.Tensor, k_BNHK: torch.Tensor, v_BNHK: torch.Tensor, *, score_scales_H: torch.Tensor
) -> torch.Tensor:
    """In fp32 but for softmax's weights, which are rounded to e4m3 once each row's sum is taken."""
    scales_H11 = score_scales_H[:, None, None] * q_BNHK.shape[-1] ** -0.5
    mixed_BHNK = []
    for q_HNK, k_HNK, v_HNK in zip(
        *(x.float().transpose(1, 2) for x in (q_BNHK, k_BNHK, v_BNHK)), strict=True
    ):
        scores_HNN = q_HNK @ k_HNK.transpose(1, 2) * scales_H11
        weights_HNN = (scores_HNN - scores_HNN.amax(-1, keepdim=True)).exp() * _LARGEST_WEIGHT
        sums_HN1 = weights_HNN.sum(-1, keepdim=True)
        mixed_BHNK.append(to_e4m3(weights_HNN).float() @ v_HNK / sums_HN1)
    return torch.stack(mixed_BHNK).transpose(1, 2)


def _flash3(
    q_BNHK: torch.Tensor, k_BNHK: torch.Tensor, v_BNHK: torch.Tensor, *, score_scales_H: torch.Tensor
) -> torch.Tensor:
    # It multiplies the scales of queries and keys, so one can stand for both. Those of values are by channel,
    # of which it knows nothing.
    return flash3_forward()(
        q_BNHK,
        k_BNHK,
        v_BNHK,
        q_descale=score_scales_H.expand(len(q_BNHK), -1),
        softmax_scale=q_BNHK.shape[-1] ** -0.5,
        num_splits=1,
    )[0]
