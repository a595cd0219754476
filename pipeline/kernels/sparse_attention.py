"""Softmax attention of each block of queries to the blocks of keys that are listed for it.

Shapes: B clips, N tokens, H heads of K channels, Q blocks of queries, M blocks of keys, of which a block of
queries has S.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from pipeline.kernels.block_means import num_blocks
from pipeline.kernels.triton_jit import jit, tl

# SpargeAttention's, and what torch's FlexAttention takes for heads of 128 channels on an H100: tiles that
# tensor cores like, of tokens that still lie close together, about 5 and 4 of them in each direction.
QUERY_BLOCK, KEY_BLOCK = 128, 64


def sparse_attention(
    q_BNHK: torch.Tensor, k_BNHK: torch.Tensor, v_BNHK: torch.Tensor, blocks_BHQS: torch.Tensor
) -> torch.Tensor:
    """(B, N, H * K): queries of each block attend to all keys of the blocks listed for it.

    Scores are scaled by K**-0.5. q, k, v: views of one fused projection, alike in strides; heads lie side by
    side, and on a card K is a power of two from 16 on. blocks: int32, contiguous; each list rises and has no
    block twice. Does 4 * B * H * K * N * S * KEY_BLOCK operations.
    """
    return _sparse_attention_op(q_BNHK, k_BNHK, v_BNHK, blocks_BHQS)


def plain_sparse_attention(
    q_BNHK: torch.Tensor, k_BNHK: torch.Tensor, v_BNHK: torch.Tensor, blocks_BHQS: torch.Tensor
) -> torch.Tensor:
    clips, tokens, num_heads, _ = q_BNHK.shape
    shape_BHQM = (clips, num_heads, num_blocks(tokens, QUERY_BLOCK), num_blocks(tokens, KEY_BLOCK))
    listed_BHQM = torch.zeros(shape_BHQM, dtype=torch.bool, device=q_BNHK.device)
    listed_BHQM.scatter_(-1, blocks_BHQS.long(), True)
    listed_BHNM = listed_BHQM.repeat_interleave(QUERY_BLOCK, dim=2)[:, :, :tokens]
    listed_BHNN = listed_BHNM.repeat_interleave(KEY_BLOCK, dim=3)[..., :tokens]
    q_BHNK, k_BHNK, v_BHNK = (tensor.float().transpose(1, 2) for tensor in (q_BNHK, k_BNHK, v_BNHK))
    mixed_BHNK = F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, attn_mask=listed_BHNN)
    return mixed_BHNK.transpose(1, 2).flatten(2).to(q_BNHK.dtype)


def triton_sparse_attention(
    q_BNHK: torch.Tensor, k_BNHK: torch.Tensor, v_BNHK: torch.Tensor, blocks_BHQS: torch.Tensor
) -> torch.Tensor:
    clips, tokens, num_heads, channels = q_BNHK.shape
    clip_stride, token_stride, *head_strides = q_BNHK.stride()
    assert q_BNHK.stride() == k_BNHK.stride() == v_BNHK.stride()
    assert head_strides == [channels, 1]
    assert channels >= 16
    assert channels & (channels - 1) == 0, "tiles of other sizes would need masks"
    query_blocks = num_blocks(tokens, QUERY_BLOCK)
    assert blocks_BHQS.is_contiguous()
    assert blocks_BHQS.shape[:3] == (clips, num_heads, query_blocks)
    out_BND = q_BNHK.new_empty(clips, tokens, num_heads * channels)
    # Blocks first: programs that run at one time then read the keys and values of few heads between them.
    _sparse_attention_kernel[query_blocks, num_heads, clips](
        q_BNHK,
        k_BNHK,
        v_BNHK,
        blocks_BHQS,
        out_BND,
        tokens,
        clip_stride,
        token_stride,
        blocks_BHQS.shape[3],
        channels**-0.5 * math.log2(math.e),
        H=num_heads,
        K=channels,
        BLOCK_N=QUERY_BLOCK,
        BLOCK_M=KEY_BLOCK,
        **_launch(q_BNHK.dtype),
    )
    return out_BND


def _launch(dtype: torch.dtype) -> dict[str, int]:
    if dtype == torch.float32:  # no tensor core takes it unrounded: this is for tests
        return {"num_warps": 16, "num_stages": 1}
    # Not tuned on a card yet. For sm_90 it takes 150 registers a thread and 128 KiB of shared memory, three
    # blocks of keys and values in turn; with 4 warps registers spill.
    return {"num_warps": 8, "num_stages": 3}


_sparse_attention_op = torch.library.custom_op(
    "vgbatch::sparse_attention", triton_sparse_attention, mutates_args=(), device_types="cuda"
)
_sparse_attention_op.register_kernel("cpu", plain_sparse_attention)


@_sparse_attention_op.register_fake
def _heads_joined(q_BNHK: torch.Tensor, *_: Any) -> torch.Tensor:
    clips, tokens, num_heads, channels = q_BNHK.shape
    return q_BNHK.new_empty(clips, tokens, num_heads * channels)


@jit
def _sparse_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    clip_stride: tl.tensor,
    token_stride: tl.tensor,
    num_listed: tl.tensor,
    log2_scale: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    head = tl.program_id(1)
    clip = tl.program_id(2).to(tl.int64)
    channels = tl.arange(0, K)[None, :]
    tokens = (block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    first = clip * clip_stride + head * K
    q = tl.load(q_ptr + first + tokens * token_stride + channels, mask=tokens < num_tokens, other=0.0)

    list_ptr = blocks_ptr + ((clip * H + head) * tl.num_programs(0) + block) * num_listed
    keys = tl.arange(0, BLOCK_M)
    cells = keys[:, None] * token_stride + channels
    highest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    mixed = tl.zeros([BLOCK_N, K], tl.float32)
    listed = tl.load(list_ptr)
    for index in range(1, num_listed):
        start = first + listed.to(tl.int64) * BLOCK_M * token_stride
        k = tl.load(k_ptr + start + cells)
        v = tl.load(v_ptr + start + cells)
        listed = tl.load(list_ptr + index)  # a turn ahead, or loading keys ahead would have to wait for it
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        highest, total, mixed = _taken_in(scores, v, log2_scale, highest, total, mixed)
    # Lists rise, so only their last block can be the clip's last, which may have fewer keys.
    present = listed * BLOCK_M + keys < num_tokens
    start = first + listed.to(tl.int64) * BLOCK_M * token_stride
    k = tl.load(k_ptr + start + cells, mask=present[:, None], other=0.0)
    v = tl.load(v_ptr + start + cells, mask=present[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.where(present[None, :], scores, float("-inf"))
    highest, total, mixed = _taken_in(scores, v, log2_scale, highest, total, mixed)

    out_ptrs = out_ptr + (clip * num_tokens + tokens) * (H * K) + head * K + channels
    tl.store(out_ptrs, (mixed / total[:, None]).to(q.dtype), mask=tokens < num_tokens)


@jit
def _taken_in(
    scores: tl.tensor,
    v: tl.tensor,
    log2_scale: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
) -> tuple[tl.tensor, ...]:
    """A step of softmax that has seen a part of the keys, in powers of two."""
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * log2_scale)
    weights = tl.exp2(scores * log2_scale - new_highest[:, None])
    fade = tl.exp2(highest - new_highest)
    total = total * fade + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
    return new_highest, total, mixed
