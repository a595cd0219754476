"""Self-attention that leaves out most pairs of tokens of a long clip, but in early steps and the first block.

Tokens that lie near each other in time and space want much the same keys. So they are put in blocks
(token_order.py), and of each head of each clip every block of queries attends to a fixed share of the blocks
of keys: those whose mean key suits its mean query best, its own always among them. Nothing is trained or
calibrated, work and shapes are the same for every clip, and no clip's choice depends on another's.

Choosing by means of blocks, of 128 queries and 64 keys, is SpargeAttention's (Zhang et al. 2025, arXiv
2502.18137), which also leaves out what turns out small on the way. Leaving the first steps and the first
layer dense is Sparse VideoGen's (Xi et al. 2025, arXiv 2502.01776), blocks that are compact in three
dimensions are Sliding Tile Attention's (Zhang et al. 2025, arXiv 2502.04507): both choose among given shapes.

Shapes: B clips, N tokens, H heads of K channels, Q blocks of queries, M blocks of keys, of which a block of
queries keeps S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeline.approx.token_order import compact_order
from pipeline.kernels.block_means import block_means
from pipeline.kernels.sparse_attention import KEY_BLOCK, QUERY_BLOCK, sparse_attention
from pipeline.sampling.schedules import Step

# Of the schedule, at its start, where the picture is laid out. On Wan, Sparse VideoGen keeps a tenth to a
# third, Radial Attention (Li et al. 2025, arXiv 2506.19852) a quarter.
_DENSE_STEPS_FRAC = 0.25


@dataclass(frozen=True, kw_only=True)
class BlockSparseAttention:
    """A SparseAttention. density: the share of the blocks of keys that a block of queries attends to.

    None of it was chosen by clips: the built-in model's have too few tokens. The density is what Sparse
    VideoGen publishes for Wan at 720p. Like Radial Attention it keeps the first block dense, whose attention
    has no pattern that is like the others'; guidance's two branches share that one.

    least_tokens: attention among 16,384 of 3,072 channels takes two fifths of a forward in 8 bits, and this
    spares half of it; at half of the length it would spare a tenth of a forward. That is reckoned with 500
    TFLOP/s for a quarter of the pairs and 0.2 ms a block for choosing them, where FlashAttention-3 has 850
    TFLOP/s in 8 bits for all.
    """

    density: float = 0.25
    dense_blocks: int = 1
    least_tokens: int = 16_384

    def order(self, grid: Sequence[int]) -> torch.Tensor:
        return compact_order(grid, block=QUERY_BLOCK, part=KEY_BLOCK)

    def __call__(self, q_BNHK: torch.Tensor, k_BNHK: torch.Tensor, v_BNHK: torch.Tensor) -> torch.Tensor:
        blocks_BHQS = chosen_blocks(q_BNHK, k_BNHK, density=self.density)
        return sparse_attention(q_BNHK, k_BNHK, v_BNHK, blocks_BHQS)


def sparse_in(step: Step, *, num_steps: int) -> BlockSparseAttention | None:
    """What a step's forwards are given; None for dense ones. num_steps: of the schedule."""
    return BlockSparseAttention() if step.index >= _DENSE_STEPS_FRAC * num_steps else None


def chosen_blocks(q_BNHK: torch.Tensor, k_BNHK: torch.Tensor, *, density: float) -> torch.Tensor:
    """The blocks of keys for each block of queries, (B, H, Q, S) of int32, rising: a fixed order of sums.

    S: density of all, rounded, but no fewer than a block of queries is made of.
    """
    q_means_BQHK, k_means_BMHK = (
        block_means(x_BNHK, block=block) for x_BNHK, block in ((q_BNHK, QUERY_BLOCK), (k_BNHK, KEY_BLOCK))
    )
    scores_BHQM = torch.einsum("bqhk,bmhk->bhqm", q_means_BQHK, k_means_BMHK)
    own_parts = QUERY_BLOCK // KEY_BLOCK
    query_blocks, key_blocks = scores_BHQM.shape[2:]
    owners_M = torch.arange(key_blocks, device=q_BNHK.device) // own_parts
    is_own_QM = owners_M == torch.arange(query_blocks, device=q_BNHK.device)[:, None]
    num_kept = min(key_blocks, max(own_parts, round(density * key_blocks)))
    kept = scores_BHQM.masked_fill_(is_own_QM, math.inf).topk(num_kept, sorted=False)
    return kept.indices.sort().values.int()
