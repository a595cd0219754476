"""Cross-attention to a prompt in a buffer of fixed length, with all of its padding folded into one key.

A model pads every prompt with M - count equal tokens and attends to them all. One key in their place, with
ln(M - count) added to its score, gives the same sums. It lies behind the prompt's own keys; a prompt that
fills the buffer has none.

Shapes: B clips, N query tokens, M rows of the buffer, H heads of K channels, D = H * K.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from pipeline.kernels.qk_norm_rope import qk_norm
from pipeline.kernels.rows import row_launch
from pipeline.kernels.triton_jit import jit, tl


def text_attention(
    q_BND: torch.Tensor,
    k_BMHK: torch.Tensor,
    v_BMHK: torch.Tensor,
    counts_B: torch.Tensor,
    *,
    q_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """(B, N, D): qk_norm of q attends to the first counts_B[b] keys and to the next, its padding's, in row b.

    Scores are scaled by K**-0.5. counts: int32, from 0 to M. q_weight: (D,) of any float dtype. All are
    contiguous; rows of k and v behind the padding's are not read. Moves 3 * B * N * D values: reads q twice
    (its norm needs all heads, attention takes them singly), writes the result; keys and values stay in L2.
    """
    return _text_attention_op(q_BND, k_BMHK, v_BMHK, counts_B, q_weight, eps)


def plain_text_attention(
    q_BND: torch.Tensor,
    k_BMHK: torch.Tensor,
    v_BMHK: torch.Tensor,
    counts_B: torch.Tensor,
    q_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    rows, num_heads = k_BMHK.shape[1:3]
    places_M, counts_B1 = torch.arange(rows, device=counts_B.device), counts_B[:, None]
    unused_BM = places_M > counts_B1
    padding_BM = torch.where(places_M == counts_B1, (rows - counts_B1).float().log(), 0.0)
    bias_BM = padding_BM.masked_fill(unused_BM, -math.inf)
    q_BNHK = qk_norm(q_BND, weight=q_weight, eps=eps, num_heads=num_heads)
    k_BMHK, v_BMHK = (tensor.masked_fill(unused_BM[..., None, None], 0.0) for tensor in (k_BMHK, v_BMHK))
    q_BHNK, k_BHMK, v_BHMK = (tensor.float().transpose(1, 2) for tensor in (q_BNHK, k_BMHK, v_BMHK))
    mixed_BHNK = F.scaled_dot_product_attention(q_BHNK, k_BHMK, v_BHMK, attn_mask=bias_BM[:, None, None])
    return mixed_BHNK.transpose(1, 2).flatten(2).to(q_BND.dtype)


def triton_text_attention(
    q_BND: torch.Tensor,
    k_BMHK: torch.Tensor,
    v_BMHK: torch.Tensor,
    counts_B: torch.Tensor,
    q_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    assert all(tensor.is_contiguous() for tensor in (q_BND, k_BMHK, v_BMHK, counts_B, q_weight))
    clips, tokens, channels = q_BND.shape
    _, rows, num_heads, head_channels = k_BMHK.shape
    assert v_BMHK.shape == k_BMHK.shape == (clips, rows, num_heads, channels // num_heads)
    rstd_BN = torch.empty(clips, tokens, dtype=torch.float32, device=q_BND.device)
    grid, tile = row_launch(q_BND, channels=channels)
    _inverse_rms_kernel[grid](q_BND, rstd_BN, tokens, eps, D=channels, **tile)

    out_BND = torch.empty_like(q_BND)
    attention_tile = _tile(q_BND.dtype)
    # Heads first: programs that run at one time then read whole rows of q between them.
    attention_grid = (num_heads, -(-tokens // attention_tile["BLOCK_N"]), clips)
    _text_attention_kernel[attention_grid](
        q_BND,
        k_BMHK,
        v_BMHK,
        counts_B,
        q_weight,
        rstd_BN,
        out_BND,
        tokens,
        head_channels**-0.5 * math.log2(math.e),
        M=rows,
        H=num_heads,
        K=head_channels,
        BLOCK_K=max(16, 1 << (head_channels - 1).bit_length()),
        **attention_tile,
    )
    return out_BND


def _tile(dtype: torch.dtype) -> dict[str, int]:
    if dtype == torch.float32:  # no tensor core takes it unrounded: this is for tests
        return {"BLOCK_N": 32, "BLOCK_M": 32, "num_warps": 4, "num_stages": 1}
    # Small programs: several share a multiprocessor, and one loads while another multiplies. With 31,248
    # queries on one H200 0.27 ms for 77 keys and 0.43 for 250; with twice the queries each 0.28 and 0.48,
    # with twice the keys 0.31 and 0.42.
    return {"BLOCK_N": 64, "BLOCK_M": 32, "num_warps": 4, "num_stages": 2}


_text_attention_op = torch.library.custom_op(
    "vgbatch::text_attention", triton_text_attention, mutates_args=(), device_types="cuda"
)
_text_attention_op.register_kernel("cpu", plain_text_attention)


@_text_attention_op.register_fake
def _like_q(q_BND: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(q_BND)


@jit
def _inverse_rms_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    clip = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_D)[None, :]
    rows = clip * num_tokens + tokens
    inside = (tokens < num_tokens)[:, None] & (channels < D)
    x = tl.load(x_ptr + rows[:, None] * D + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, tl.rsqrt(tl.sum(x * x, axis=1) / D + eps), mask=tokens < num_tokens)


@jit
def _text_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    log2_scale: tl.tensor,
    M: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    clip = tl.program_id(2).to(tl.int64)
    count = tl.load(counts_ptr + clip)
    num_keys = tl.minimum(count + 1, M)
    padding_bias = tl.log2(tl.maximum(M - count, 1).to(tl.float32))  # scores are in powers of two

    channels = tl.arange(0, BLOCK_K)[None, :]
    tokens = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = clip * num_tokens + tokens
    cells = rows[:, None] * (H * K) + head * K + channels
    inside = (tokens < num_tokens)[:, None] & (channels < K)
    raw = tl.load(q_ptr + cells, mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=tokens < num_tokens, other=0.0)
    weight = tl.load(q_weight_ptr + head * K + channels, mask=channels < K, other=0.0).to(tl.float32)
    q = (raw.to(tl.float32) * rstd[:, None] * weight).to(raw.dtype)

    highest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    mixed = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, num_keys, BLOCK_M):
        keys = start + tl.arange(0, BLOCK_M)
        key_cells = (clip * M + keys)[:, None] * (H * K) + head * K + channels
        used = (keys < num_keys)[:, None] & (channels < K)
        k = tl.load(k_ptr + key_cells, mask=used, other=0.0)
        v = tl.load(v_ptr + key_cells, mask=used, other=0.0)
        bias = tl.where(keys < count, 0.0, tl.where(keys < num_keys, padding_bias, float("-inf")))
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale + bias[None, :]
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_highest[:, None])
        fade = tl.exp2(highest - new_highest)
        total = total * fade + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        highest = new_highest
    tl.store(out_ptr + cells, (mixed / total[:, None]).to(raw.dtype), mask=inside)
