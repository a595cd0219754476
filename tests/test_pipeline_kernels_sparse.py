"""Attention to listed blocks against float64: its kernel on a card or in Triton's interpreter, and the CPU's.

The interpreter's bf16 is wrong, so without a card the kernel runs in fp32 alone. Odd sizes are in the grid.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from pipeline.kernels.attention import TORCH, attention
from pipeline.kernels.block_means import block_means, num_blocks, triton_block_means
from pipeline.kernels.sparse_attention import (
    KEY_BLOCK,
    QUERY_BLOCK,
    sparse_attention,
    triton_sparse_attention,
)
from tests.pipeline_ops import assert_close, rand

pytestmark = pytest.mark.usefixtures("interpreter_loops")

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
HALF_AND_FULL = (torch.bfloat16, torch.float32)
ROUTES: list[tuple[Any, str, torch.dtype]] = [(sparse_attention, "cpu", dtype) for dtype in HALF_AND_FULL]
if find_spec("triton"):
    ROUTES += [
        (triton_sparse_attention, DEVICE, dtype) for dtype in (HALF_AND_FULL if CARD else (torch.float32,))
    ]

# Clips, tokens, heads, channels of one. Last blocks of queries and of keys: whole, of one token, of others; a
# block of queries whose second block of keys is missing.
SIZES = ((1, 1, 1, 16), (2, 129, 1, 32), (1, 320, 2, 16), (2, 300, 2, 16), (1, 257, 1, 128), (1, 150, 2, 64))


@pytest.fixture(params=ROUTES, ids=lambda route: f"{route[0].__name__} {route[1]} {route[2]}")
def route(request: pytest.FixtureRequest) -> tuple[Any, str, torch.dtype]:
    return request.param


def projected(sizes: tuple[int, ...], *, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values as views of one projection."""
    clips, tokens, heads, channels = sizes
    qkv = rand(clips, tokens, 3, heads, channels, seed=1, dtype=dtype, device=device)
    return qkv.unbind(2)


def lists_of(sizes: tuple[int, ...], *, num_listed: int, device: str) -> torch.Tensor:
    """Other blocks for each clip, head and block of queries, so many or all."""
    clips, tokens, heads, _ = sizes
    query_blocks, key_blocks = num_blocks(tokens, QUERY_BLOCK), num_blocks(tokens, KEY_BLOCK)
    scores = torch.rand((clips, heads, query_blocks, key_blocks), generator=torch.Generator().manual_seed(2))
    chosen = scores.topk(min(num_listed, key_blocks)).indices.sort().values
    return chosen.int().to(device)


@pytest.mark.parametrize("num_listed", [1, 3, 100])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_queries_attend_to_the_blocks_listed_for_theirs(
    route: tuple[Any, str, torch.dtype], sizes: tuple[int, ...], num_listed: int
) -> None:
    function, device, dtype = route
    q, k, v = projected(sizes, dtype=dtype, device=device)
    blocks = lists_of(sizes, num_listed=num_listed, device=device)

    def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mixed = []
        for block, rows in enumerate(q.split(QUERY_BLOCK, dim=1)):
            for clip, head in ((clip, head) for clip in range(sizes[0]) for head in range(sizes[2])):
                keys, values = (
                    torch.cat([x[clip, :, head].split(KEY_BLOCK)[each] for each in blocks[clip, head, block]])
                    for x in (k, v)
                )
                weights = (rows[clip, :, head] @ keys.T / sizes[3] ** 0.5).softmax(-1)
                mixed.append(((clip, block, head), weights @ values))
        whole = torch.empty_like(q)
        for (clip, block, head), part in mixed:
            whole[clip, block * QUERY_BLOCK : block * QUERY_BLOCK + len(part), head] = part
        return whole.flatten(2)

    assert_close(function(q, k, v, blocks), formula, q, k, v, dtype=dtype)


def test_with_every_block_listed_it_is_dense_attention(route: tuple[Any, str, torch.dtype]) -> None:
    function, device, dtype = route
    sizes = (2, 300, 2, 16)
    q, k, v = projected(sizes, dtype=dtype, device=device)
    mixed = function(q, k, v, lists_of(sizes, num_listed=100, device=device))
    assert_close(mixed, partial(attention, backend=TORCH), q, k, v, dtype=dtype)


def test_keys_that_are_not_listed_are_not_read(route: tuple[Any, str, torch.dtype]) -> None:
    function, device, dtype = route
    q, k, v = projected((1, 300, 1, 16), dtype=dtype, device=device)
    blocks = torch.tensor([[[[1, 4]] * 3]], dtype=torch.int32, device=device)
    expected = function(q, k, v, blocks)
    for start in (0, 2 * KEY_BLOCK, 3 * KEY_BLOCK):
        k[:, start : start + KEY_BLOCK] = -1e4
        v[:, start : start + KEY_BLOCK] = 1e4
    assert torch.equal(function(q, k, v, blocks), expected)


def test_large_scores_stay_finite(route: tuple[Any, str, torch.dtype]) -> None:
    function, device, dtype = route
    q, k, v = projected((1, 150, 1, 16), dtype=dtype, device=device)
    q *= 1e3
    assert function(q, k, v, lists_of((1, 150, 1, 16), num_listed=2, device=device)).isfinite().all()


def test_a_clip_does_not_depend_on_its_neighbours(route: tuple[Any, str, torch.dtype]) -> None:
    function, device, dtype = route
    sizes = (2, 300, 2, 16)
    q, k, v = projected(sizes, dtype=dtype, device=device)
    blocks = lists_of(sizes, num_listed=2, device=device)
    expected = function(q, k, v, blocks)[1]
    q[0], k[0], v[0] = 7.0, -3.0, 5.0
    blocks[0] = blocks[0, :1, :1]
    assert torch.equal(function(q, k, v, blocks)[1], expected)


@pytest.mark.parametrize("block", [QUERY_BLOCK, KEY_BLOCK])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_means_are_of_a_blocks_own_tokens(
    route: tuple[Any, str, torch.dtype], sizes: tuple[int, ...], block: int
) -> None:
    function, device, dtype = route
    _, k, _ = projected(sizes, dtype=dtype, device=device)
    is_kernel = function is triton_sparse_attention
    means = triton_block_means(k, block) if is_kernel else block_means(k, block=block)
    expected = torch.stack([part.double().mean(1) for part in k.split(block, dim=1)], dim=1)
    torch.testing.assert_close(means, expected.float(), rtol=0, atol=2e-6)


def test_what_the_ops_say_of_themselves_is_true() -> None:
    q, k, v = projected((2, 150, 2, 16), dtype=torch.float32, device=DEVICE)
    blocks = lists_of((2, 150, 2, 16), num_listed=2, device=DEVICE)
    ops = torch.ops.vgbatch
    for op, inputs in ((ops.sparse_attention, (q, k, v, blocks)), (ops.block_means, (q, QUERY_BLOCK))):
        found = torch.library.opcheck(op.default, inputs)
        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.skipif(not find_spec("triton"), reason="no kernel without Triton")
@pytest.mark.parametrize("wrong", ["heads of 24 channels", "strides that differ"])
def test_a_kernel_takes_no_other_heads_or_strides(wrong: str) -> None:
    channels = 24 if wrong.startswith("heads") else 16
    q, k, v = projected((1, 130, 1, channels), dtype=torch.float32, device=DEVICE)
    if channels == 16:
        k = k.contiguous()
    with pytest.raises(AssertionError):
        triton_sparse_attention(q, k, v, lists_of((1, 130, 1, channels), num_listed=1, device=DEVICE))
