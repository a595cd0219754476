"""Which blocks of tokens attend to which, and when: in a forward, in a denoiser and in the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from manifests.presets import PRESETS
from pipeline.approx import sparse_attention as module
from pipeline.approx.fp8 import fp8_convert
from pipeline.approx.presets import Approximation, approximation_of
from pipeline.approx.sparse_attention import BlockSparseAttention, chosen_blocks, sparse_in
from pipeline.approx.token_order import compact_order
from pipeline.engine import Engine
from pipeline.kernels.attention import TORCH, attention
from pipeline.kernels.sparse_attention import KEY_BLOCK, QUERY_BLOCK
from pipeline.models import wan_denoiser
from pipeline.models.resolve import ResolvedModel, resolve_model
from pipeline.models.wan_denoiser import RECORDED_TOKENS, WanDenoiser
from pipeline.models.wan_transformer import WanTransformer
from pipeline.sampling.schedules import make_schedule
from tests.pipeline_checkpoints import build_checkpoint, make_batch, make_engine, make_job
from tests.run_cases import ROOT
from tests.test_pipeline_approx_fp8 import BOTH, LINEARS, make_module

GRIDS = [(31, 24, 42), (3, 5, 7), (1, 16, 16), (2, 9, 31), (1, 1, 300)]
LATENTS = (2, 4, 6, 16, 20)  # clips, channels, frames, height, width: 480 tokens, 3.75 blocks of queries


def places(grid: tuple[int, ...]) -> torch.Tensor:
    return torch.cartesian_prod(*(torch.arange(side) for side in grid))


def mean_extent(order: torch.Tensor, grid: tuple[int, ...], *, block: int) -> float:
    """Of whole blocks, the sum of their sides."""
    parts = places(grid)[order][: len(order) // block * block].unflatten(0, (-1, block))
    return float((parts.amax(1) - parts.amin(1) + 1).float().sum(1).mean())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_an_order_has_every_token_once(grid: tuple[int, int, int]) -> None:
    order = BlockSparseAttention().order(grid)
    assert torch.equal(order.sort().values, torch.arange(math.prod(grid)))


@pytest.mark.parametrize(("block", "side"), [(QUERY_BLOCK, 5.04), (KEY_BLOCK, 4)])
def test_blocks_are_nearly_cubes(block: int, side: float) -> None:
    grid = (31, 24, 42)
    assert 3 * side < mean_extent(BlockSparseAttention().order(grid), grid, block=block) < 3 * 1.15 * side
    assert mean_extent(torch.arange(math.prod(grid)), grid, block=block) > 2.5 * 3 * side


def test_where_blocks_fill_the_grid_each_is_a_box() -> None:
    order = compact_order((4, 8, 16), block=64, part=8)
    for block, sides in ((64, [4, 4, 4]), (8, [2, 2, 2])):
        parts = places((4, 8, 16))[order].unflatten(0, (-1, block))
        assert ((parts.amax(1) - parts.amin(1) + 1) == torch.tensor(sides)).all()


def along(directions: list[int], *, block: int, num_tokens: int) -> torch.Tensor:
    """(N, 16): each block's tokens along one axis, with what cancels out of its mean."""
    axes = torch.eye(16)[directions].repeat_interleave(block, 0)[:num_tokens]
    noise = torch.zeros(num_tokens, 16)
    noise[0::2], noise[1::2] = 9.0, -9.0
    return axes + noise


def test_a_block_of_queries_keeps_its_own_keys_and_those_that_suit_it_best() -> None:
    num_tokens = 3 * QUERY_BLOCK + 20  # a last block of queries with one of keys, of 20 tokens
    q = torch.zeros(2, num_tokens, 2, 16)
    k = torch.zeros(2, num_tokens, 2, 16)
    q[0, :, 0] = along([1, 2, 3, 4], block=QUERY_BLOCK, num_tokens=num_tokens)
    k[0, :, 0] = along([0, 0, 3, 4, 1, 0, 2], block=KEY_BLOCK, num_tokens=num_tokens)
    q[0, :, 1] = q[0, :, 0].roll(QUERY_BLOCK, 0)
    k[0, :, 1] = k[0, :, 0]
    blocks = chosen_blocks(q, k, density=3 / 7)
    assert blocks.dtype == torch.int32
    assert blocks.shape == (2, 2, 4, 3)
    assert blocks[0, 0, :3].tolist() == [[0, 1, 4], [2, 3, 6], [2, 4, 5]]
    assert {3, 6} < set(blocks[0, 0, 3].tolist())
    assert 6 in blocks[0, 1, 2]  # where along axis 2 now
    assert (blocks.diff(dim=-1) > 0).all()
    assert torch.equal(chosen_blocks(q[:1], k[:1], density=3 / 7), blocks[:1])


@pytest.mark.parametrize(
    ("density", "num_tokens", "num_kept"),
    [(0.25, 31_248, 122), (1.0, 700, 11), (0.01, 700, 2), (0.25, 60, 1), (0.5, 128, 2)],
)
def test_how_many_blocks_are_kept_is_told_by_shapes(density: float, num_tokens: int, num_kept: int) -> None:
    x = torch.zeros(1, num_tokens, 1, 16)
    blocks = chosen_blocks(x, x, density=density)
    assert blocks.shape == (1, 1, -(-num_tokens // QUERY_BLOCK), num_kept)
    own = torch.arange(blocks.shape[2]) * (QUERY_BLOCK // KEY_BLOCK)
    assert (blocks == own[:, None]).any(-1).all()


def test_where_attention_is_local_a_quarter_of_the_pairs_is_nearly_all_of_it() -> None:
    grid = (6, 12, 42)
    generator = torch.Generator().manual_seed(3)
    waves = places(grid).float() @ (0.5 * torch.randn((3, 32), generator=generator))
    features = torch.cat([waves.cos(), waves.sin()], dim=1)[None, :, None]  # near tokens have like ones
    qkv = torch.stack([4 * features, features, torch.randn(features.shape, generator=generator)], dim=2)
    dense = attention(*qkv.unbind(2), backend=TORCH)

    def error(order: torch.Tensor) -> float:
        mixed = BlockSparseAttention()(*qkv[:, order].unbind(2))
        return float((mixed[:, order.argsort()] - dense).norm() / dense.norm())

    compact, raster = error(BlockSparseAttention().order(grid)), error(torch.arange(math.prod(grid)))
    assert compact < 0.05
    assert compact < raster / 4


def velocities(
    transformer: WanTransformer,
    sparse: BlockSparseAttention | None = None,
    *,
    clips: slice = slice(None),
    num_texts: int = 2,
) -> torch.Tensor:
    generator, device = torch.Generator().manual_seed(5), transformer.module.patch_embedding.weight.device
    latents = torch.randn(LATENTS, generator=generator)[clips].to(device)
    texts = torch.randn((num_texts, LATENTS[0], 21, 16), generator=generator)[:, clips].to(device)
    counts = torch.full((len(latents),), 21, dtype=torch.int32, device=device)
    tables = transformer.step_tables(torch.tensor([713], device=device))
    outcome = transformer(
        latents,
        blocks_L6D=tables.blocks_SL6D[0],
        head_2D=tables.head_S2D[0],
        texts=[transformer.text_keys(text, counts) for text in texts],
        sparse=sparse,
    )
    return torch.stack(outcome)


@pytest.fixture(scope="module")
def dense() -> torch.Tensor:
    return velocities(WanTransformer(make_module()))


ALL = BlockSparseAttention(density=1.0)
A_QUARTER = BlockSparseAttention(density=0.25)


@pytest.mark.parametrize(
    "sparse", [ALL, BlockSparseAttention(dense_blocks=3)], ids=["every pair", "dense blocks"]
)
def test_with_nothing_left_out_a_forward_is_the_dense_one_in_another_order(
    dense: torch.Tensor, sparse: BlockSparseAttention
) -> None:
    ours = velocities(WanTransformer(make_module()), sparse)
    torch.testing.assert_close(ours, dense, rtol=0, atol=2e-5 * float(dense.abs().max()))


def test_a_quarter_of_the_pairs_gives_another_forward(dense: torch.Tensor) -> None:
    error = (velocities(WanTransformer(make_module()), A_QUARTER) - dense).norm() / dense.norm()
    assert 1e-3 < error < 0.3


def test_blocks_of_the_transformer_are_dense_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(self: BlockSparseAttention, *qkv: torch.Tensor) -> torch.Tensor:
        calls.append(self.dense_blocks)
        return attention(*qkv, backend=TORCH)

    monkeypatch.setattr(BlockSparseAttention, "__call__", counted)
    for dense_blocks in (0, 1, 3):
        velocities(WanTransformer(make_module()), BlockSparseAttention(dense_blocks=dense_blocks))
    assert calls == [0] * (1 + 2 + 2) + [1] * (2 + 2)  # the first block is one for both texts


def test_streamed_blocks_compute_as_resident_ones() -> None:
    streamed = WanTransformer(make_module(), streamed_to="cpu")
    resident = WanTransformer(make_module())
    assert torch.equal(velocities(streamed, A_QUARTER), velocities(resident, A_QUARTER))


@pytest.mark.parametrize("support", [BOTH, LINEARS], ids=str)
def test_in_8_bits_sparse_attention_is_the_streams_own(support: Any, dense: torch.Tensor) -> None:
    linears_alone = velocities(WanTransformer(make_module(), convert=fp8_convert(LINEARS)))
    every = BlockSparseAttention(density=1.0, dense_blocks=0)
    ours = velocities(WanTransformer(make_module(), convert=fp8_convert(support)), every)
    # Rounding to e4m3 is not continuous: what fp32 sums otherwise may fall to the other side of a middle.
    assert (ours - linears_alone).norm() < 0.2 * (linears_alone - dense).norm()


def test_a_clip_does_not_depend_on_its_neighbours() -> None:
    transformer = WanTransformer(make_module())
    together = velocities(transformer, A_QUARTER)
    for clip in range(LATENTS[0]):
        alone = velocities(transformer, A_QUARTER, clips=slice(clip, clip + 1))
        torch.testing.assert_close(together[:, clip : clip + 1], alone, rtol=0, atol=1e-5)


def test_another_shape_has_an_order_of_its_own() -> None:
    transformer = WanTransformer(make_module())
    first = velocities(transformer, A_QUARTER)
    other = torch.randn(1, 4, 3, 12, 22, generator=torch.Generator().manual_seed(1))
    tables = transformer.step_tables(torch.tensor([713]))
    keys = transformer.text_keys(torch.ones(1, 21, 16), torch.tensor([21], dtype=torch.int32))
    settings = {"blocks_L6D": tables.blocks_SL6D[0], "head_2D": tables.head_S2D[0], "texts": [keys]}
    (ours,), (expected,) = (transformer(other, **settings, sparse=sparse) for sparse in (ALL, None))
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    assert torch.equal(velocities(transformer, A_QUARTER), first)


# When: by step, by length.


def test_early_steps_are_dense() -> None:
    steps = make_schedule(
        torch.linspace(1000, 50, 20), boundary_timestep=500.0, guidance_scale=3.0, guidance_scale_2=None
    )
    found = [sparse_in(step, num_steps=len(steps)) for step in steps]
    assert found == [None] * 5 + [BlockSparseAttention()] * 15


def test_what_is_recorded_is_never_sparse() -> None:
    assert BlockSparseAttention().least_tokens > RECORDED_TOKENS


def test_the_preset_is_a_switch_of_its_own() -> None:
    own = approximation_of("sparse-attention")
    assert own == Approximation(sparse_attention=True)
    assert not own.changes_steps
    assert [name for name in PRESETS if name != "exact" and approximation_of(name).sparse_attention] == [
        "sparse-attention"
    ]


def test_the_readme_names_every_preset() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in PRESETS if f"`{name}`" not in text] == []


# What follows is the engine itself, over tiny checkpoints.

SIZE = {"width": 128, "height": 128, "steps": 8}
NUM_TOKENS = 3 * 8 * 8


@pytest.fixture(scope="module")
def t2v(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    return resolve_model(str(build_checkpoint(tmp_path_factory.mktemp("t2v"), "t2v")))


@pytest.fixture
def for_short_clips(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes clips of so many tokens long enough."""

    def patch(least_tokens: int) -> None:
        small = partial(BlockSparseAttention, least_tokens=least_tokens, dense_blocks=0)
        monkeypatch.setattr(module, "BlockSparseAttention", small)

    return patch


def frames(
    model: ResolvedModel, engine: Engine, *, seeds: tuple[int, ...] = (1, 2), **settings: Any
) -> np.ndarray[Any, Any]:
    jobs = [make_job(model, id=str(seed), seed=seed, **{**SIZE, **settings}) for seed in seeds]
    clips = engine.render(make_batch(model, *jobs, size=3)).clips
    return np.stack([clip.frames for clip in clips if clip.frames is not None])


def test_a_clip_that_is_too_short_is_the_exact_one_to_the_last_bit(
    t2v: ResolvedModel, for_short_clips: Callable[[int], None]
) -> None:
    engine = make_engine(t2v)
    exact = frames(t2v, engine)
    loaded = engine._loaded
    assert np.array_equal(frames(t2v, engine, preset="sparse-attention"), exact)
    for_short_clips(NUM_TOKENS + 1)
    assert np.array_equal(frames(t2v, engine, preset="sparse-attention"), exact)
    assert engine._loaded is loaded  # with the same weights
    for_short_clips(NUM_TOKENS)
    assert not np.array_equal(frames(t2v, engine, preset="sparse-attention"), exact)
    assert engine._loaded is loaded


@pytest.mark.parametrize(
    "approximation",
    [
        Approximation(sparse_attention=True),
        Approximation(sparse_attention=True, fp8=True),
        Approximation(sparse_attention=True, step_cache_limit=math.inf),
        Approximation(sparse_attention=True, guidance_reuse_from=0.3),
    ],
    ids=["alone", "fp8", "step cache", "guidance reuse"],
)
def test_late_steps_that_are_computed_are_sparse(
    t2v: ResolvedModel,
    for_short_clips: Callable[[int], None],
    approximation: Approximation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for_short_clips(0)
    sparse_steps: dict[int, bool] = {}
    forward = WanDenoiser._velocities

    def watched(self: WanDenoiser, latents: torch.Tensor, index: int, **settings: Any) -> Any:
        sparse_steps[index] = settings["sparse"] is not None
        return forward(self, latents, index, **settings)

    monkeypatch.setattr(wan_denoiser.WanDenoiser, "_velocities", watched)
    frames(t2v, Engine(make_engine(t2v).config, approximation=approximation))
    computed = [0, 1, 7] if approximation.step_cache_limit else list(range(8))
    assert sparse_steps == {index: index >= 2 for index in computed}


def test_a_job_alone_is_the_job_in_a_batch(
    t2v: ResolvedModel, for_short_clips: Callable[[int], None]
) -> None:
    for_short_clips(0)
    engine = make_engine(t2v)
    together = frames(t2v, engine, preset="sparse-attention")
    alone = frames(t2v, engine, preset="sparse-attention", seeds=(2,))
    assert np.array_equal(together[1:], alone)
