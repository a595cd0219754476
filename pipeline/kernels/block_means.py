"""Means of blocks of consecutive tokens, for each head.

Shapes: B clips, N tokens, H heads of K channels, M blocks.
"""

from __future__ import annotations

import torch

from pipeline.kernels.triton_jit import jit, tl


def num_blocks(num_tokens: int, block: int) -> int:
    """The last one may be smaller."""
    return -(-num_tokens // block)


def block_means(x_BNHK: torch.Tensor, *, block: int) -> torch.Tensor:
    """Of each block of so many tokens, (B, M, H, K) in fp32; of the last one's own where it has fewer.

    x: a view as of a fused projection, its heads side by side. On a card block and K are powers of two. Moves
    B * N * H * K values of x's dtype: reads x. A block's sum has one order, however many there are.
    """
    return _block_means_op(x_BNHK, block)


def plain_block_means(x_BNHK: torch.Tensor, block: int) -> torch.Tensor:
    num_whole, num_left = divmod(x_BNHK.shape[1], block)
    whole_BNHK, left_BNHK = x_BNHK.split([num_whole * block, num_left], dim=1)
    means_BMHK = whole_BNHK.unflatten(1, (num_whole, block)).mean(2, dtype=torch.float32)
    if num_left == 0:
        return means_BMHK
    return torch.cat([means_BMHK, left_BNHK.mean(1, keepdim=True, dtype=torch.float32)], dim=1)


def triton_block_means(x_BNHK: torch.Tensor, block: int) -> torch.Tensor:
    clips, tokens, num_heads, channels = x_BNHK.shape
    clip_stride, token_stride, *head_strides = x_BNHK.stride()
    assert head_strides == [channels, 1]
    assert channels & (channels - 1) == block & (block - 1) == 0
    means_BMHK = _room_for(x_BNHK, block)
    _block_means_kernel[num_blocks(tokens, block), num_heads, clips](
        x_BNHK, means_BMHK, tokens, clip_stride, token_stride, K=channels, BLOCK=block
    )
    return means_BMHK


_block_means_op = torch.library.custom_op(
    "vgbatch::block_means", triton_block_means, mutates_args=(), device_types="cuda"
)
_block_means_op.register_kernel("cpu", plain_block_means)


@_block_means_op.register_fake
def _room_for(x_BNHK: torch.Tensor, block: int) -> torch.Tensor:
    clips, tokens, num_heads, channels = x_BNHK.shape
    shape_BMHK = (clips, num_blocks(tokens, block), num_heads, channels)
    return torch.empty(shape_BMHK, dtype=torch.float32, device=x_BNHK.device)


@jit
def _block_means_kernel(
    x_ptr: tl.tensor,
    means_ptr: tl.tensor,
    num_tokens: tl.tensor,
    clip_stride: tl.tensor,
    token_stride: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    head = tl.program_id(1)
    clip = tl.program_id(2).to(tl.int64)
    tokens = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    channels = tl.arange(0, K)
    x_ptrs = x_ptr + clip * clip_stride + tokens * token_stride + head * K + channels[None, :]
    x = tl.load(x_ptrs, mask=tokens < num_tokens, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / tl.minimum(num_tokens - block * BLOCK, BLOCK)
    row = (clip * tl.num_programs(0) + block) * tl.num_programs(1) + head
    tl.store(means_ptr + row * K + channels, mean)
