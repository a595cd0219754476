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

_PROGRAMS = 2  # that a multiprocessor runs at one time
_ROOM_FOR_128 = 112 * 1024  # bytes of its memory, for one that keeps 128 keys of 128 channels


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
    attention_tile = _tile(q_BND)
    num_chunks = _num_programs(q_BND) // (num_heads * clips)
    num_tiles = -(-tokens // attention_tile["BLOCK_N"])
    # Heads first: programs that run at one time then read whole rows of q between them.
    _text_attention_kernel[num_heads, max(1, min(num_chunks, num_tiles)), clips](
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


def _tile(q_BND: torch.Tensor) -> dict[str, int]:
    """BLOCK_N queries at a time; KEPT keys that stay at hand, and BLOCK_M of the others at a time."""
    if q_BND.dtype == torch.float32:  # no tensor core takes it unrounded: this is for tests
        return {"BLOCK_N": 32, "KEPT": 32, "BLOCK_M": 32, "num_warps": 4, "num_stages": 1}
    # 31,248 queries on one H200, 96 / 128 / 250 / 512 tokens of text: 0.15 / 0.18 / 0.30 / 0.60 ms. Where no
    # key stays 0.26 / 0.29 / 0.38 / 0.65; with queries that are not loaded ahead 0.20 / 0.26 / 0.36 / 0.64;
    # with 128 queries and 8 warps 0.20 / 0.24 / 0.38 / 0.75.
    room = torch.cuda.get_device_properties(q_BND.device).shared_memory_per_multiprocessor
    kept = 128 if room >= _PROGRAMS * _ROOM_FOR_128 else 64
    return {"BLOCK_N": 64, "KEPT": kept, "BLOCK_M": 32, "num_warps": 4, "num_stages": 2}


def _num_programs(q_BND: torch.Tensor) -> int:
    """As many as a card runs at one time; a few where there is none."""
    if not q_BND.is_cuda:
        return 8
    return _PROGRAMS * int(torch.cuda.get_device_properties(q_BND.device).multi_processor_count)


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
    KEPT: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """One head of every so many blocks of queries. The first keys, which for most prompts are all, stay."""
    head = tl.program_id(0)
    clip = tl.program_id(2).to(tl.int64)
    count = tl.load(counts_ptr + clip)
    num_keys = tl.minimum(count + 1, M)
    k_ptr += clip * (M * H * K) + head * K
    v_ptr += clip * (M * H * K) + head * K
    q_ptr += clip * num_tokens * (H * K) + head * K
    out_ptr += clip * num_tokens * (H * K) + head * K
    rstd_ptr += clip * num_tokens
    channels = tl.arange(0, BLOCK_K)[None, :]
    weight = tl.load(q_weight_ptr + head * K + channels, mask=channels < K, other=0.0).to(tl.float32)
    weight *= log2_scale  # scores are in powers of two
    kept_k, kept_v, kept_bias = _keys(k_ptr, v_ptr, 0, count, num_keys, channels, M, H, K, KEPT)

    # The next block's queries are on their way while this one's are multiplied.
    block = tl.program_id(1)
    raw, rstd = _queries(q_ptr, rstd_ptr, block * BLOCK_N, num_tokens, channels, H, K, BLOCK_N)
    for block in range(tl.program_id(1), tl.cdiv(num_tokens, BLOCK_N), tl.num_programs(1)):
        first = block * BLOCK_N
        q = (raw.to(tl.float32) * rstd[:, None] * weight).to(raw.dtype)
        following = first + BLOCK_N * tl.num_programs(1)
        raw, rstd = _queries(q_ptr, rstd_ptr, following, num_tokens, channels, H, K, BLOCK_N)

        kept_scores = tl.dot(q, tl.trans(kept_k), input_precision="ieee") + kept_bias[None, :]
        highest = tl.max(kept_scores, axis=1)
        kept_weights = tl.exp2(kept_scores - highest[:, None])
        total = tl.sum(kept_weights, axis=1)
        mixed = tl.dot(kept_weights.to(kept_v.dtype), kept_v, input_precision="ieee")
        for start in range(KEPT, num_keys, BLOCK_M):
            k, v, bias = _keys(k_ptr, v_ptr, start, count, num_keys, channels, M, H, K, BLOCK_M)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") + bias[None, :]
            new_highest = tl.maximum(highest, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_highest[:, None])
            fade = tl.exp2(highest - new_highest)
            total = total * fade + tl.sum(weights, axis=1)
            mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
            highest = new_highest
        own = tl.arange(0, BLOCK_N)
        inside = (own < num_tokens - first)[:, None] & (channels < K)
        out_ptrs = out_ptr + first.to(tl.int64) * (H * K) + own[:, None] * (H * K) + channels
        tl.store(out_ptrs, (mixed / total[:, None]).to(raw.dtype), mask=inside)


@jit
def _queries(
    q_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    first: tl.tensor,
    num_tokens: tl.tensor,
    channels: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A block of one head's, and what to multiply each with; zeros behind the last."""
    own = tl.arange(0, BLOCK_N)
    present = own < num_tokens - first
    q_ptrs = q_ptr + first.to(tl.int64) * (H * K) + own[:, None] * (H * K) + channels
    raw = tl.load(q_ptrs, mask=present[:, None] & (channels < K), other=0.0)
    return raw, tl.load(rstd_ptr + first + own, mask=present, other=0.0)


@jit
def _keys(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    num_keys: tl.tensor,
    channels: tl.tensor,
    M: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A block of one head's keys and values, and what to add to their scores."""
    own = tl.arange(0, BLOCK)
    used = own < num_keys - start
    cells = start * (H * K) + own[:, None] * (H * K) + channels
    k = tl.load(k_ptr + cells, mask=used[:, None] & (channels < K), other=0.0)
    v = tl.load(v_ptr + cells, mask=used[:, None] & (channels < K), other=0.0)
    padding_bias = tl.log2(tl.maximum(M - count, 1).to(tl.float32))
    bias = tl.where(own < count - start, 0.0, tl.where(used, padding_bias, float("-inf")))
    return k, v, bias
