"""Sparse attention on a card: at the length of a real clip, and in a forward in half precision."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeline.approx.fp8 import fp8_convert, fp8_support
from pipeline.approx.sparse_attention import BlockSparseAttention, chosen_blocks
from pipeline.kernels.attention import TORCH, attention
from pipeline.kernels.sparse_attention import plain_sparse_attention, sparse_attention
from pipeline.models.wan_transformer import WanTransformer
from tests.test_pipeline_approx_sparse_attention import velocities
from tests.test_pipeline_on_card_fp8 import make_module

CARD = "cuda:0"
EVERY_PAIR = BlockSparseAttention(density=1.0)
A_QUARTER = BlockSparseAttention(density=0.25)


def projected(clips: int, tokens: int, heads: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(clips, tokens, 3, heads, 128, device=CARD, dtype=torch.bfloat16).unbind(2)


def test_at_the_length_of_a_clip_every_pair_is_dense_attention() -> None:
    q, k, v = projected(1, 31_248, 2)
    dense = attention(q, k, v, backend=TORCH).float()
    assert (EVERY_PAIR(q, k, v).float() - dense).norm() < 0.01 * dense.norm()


def test_a_clip_does_not_depend_on_its_neighbours_nor_on_the_hour() -> None:
    q, k, v = projected(3, 5_000, 4)
    together = A_QUARTER(q, k, v)
    assert torch.equal(A_QUARTER(q, k, v), together)
    first = [torch.cat([x[:1], x[1:].flip(0)]) for x in (q, k, v)]
    qkv = torch.stack(first, dim=2).unbind(2)
    assert torch.equal(A_QUARTER(*qkv), torch.cat([together[:1], together[1:].flip(0)]))


def test_a_quarter_is_what_plain_torch_makes_of_the_same_blocks() -> None:
    q, k, v = projected(1, 3_000, 4)
    blocks = chosen_blocks(q, k, density=0.25)
    plain = plain_sparse_attention(q, k, v, blocks).float()
    assert (sparse_attention(q, k, v, blocks).float() - plain).norm() < 0.01 * plain.norm()


def test_in_half_precision_a_forward_of_every_pair_is_as_near_as_the_dense_one() -> None:
    truth = velocities(WanTransformer(make_module(device=CARD, dtype=torch.float32)))
    half = WanTransformer(make_module(device=CARD, dtype=torch.bfloat16))
    allowed, error = ((velocities(half, sparse).float() - truth).norm() for sparse in (None, EVERY_PAIR))
    assert error <= 1.1 * allowed


def test_streamed_blocks_compute_as_resident_ones() -> None:
    streamed = WanTransformer(make_module(device="cpu", dtype=torch.bfloat16), streamed_to=CARD)
    resident = WanTransformer(make_module(device=CARD, dtype=torch.bfloat16))
    assert torch.equal(velocities(streamed, A_QUARTER), velocities(resident, A_QUARTER))


def test_beside_8_bit_linears_a_forward_of_every_pair_is_theirs() -> None:
    linears = replace(fp8_support(CARD, dtype=torch.bfloat16), attention=False)
    if not linears.linears:
        return
    exact = velocities(WanTransformer(make_module(device=CARD, dtype=torch.float32))).float()
    module = make_module(device=CARD, dtype=torch.bfloat16)
    transformer = WanTransformer(module, convert=fp8_convert(linears))
    allowed, error = (
        (velocities(transformer, sparse).float() - exact).norm() for sparse in (None, EVERY_PAIR)
    )
    assert error <= 1.1 * allowed
