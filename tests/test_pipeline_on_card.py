"""What only a card can show: memory that stays, kernels that are replayed, libraries that are chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from manifests.job import Batch
from pipeline.config import EngineConfig
from pipeline.engine import Engine
from pipeline.graph.attention_choice import choose_backend
from pipeline.graph.recorded import Recorded
from pipeline.kernels.attention import FLASH3, TORCH, attention, available_backends, query_rows
from pipeline.kernels.text_attention import plain_text_attention, text_attention
from pipeline.kernels.triton_jit import compiled
from pipeline.models.resolve import ResolvedModel, resolve_model
from tests.pipeline_checkpoints import make_batch, make_job
from tests.pipeline_ops import EPS, rand

CARD = "cuda:0"


@pytest.fixture(scope="module")
def model() -> ResolvedModel:
    return resolve_model("builtin")


@pytest.fixture(scope="module")
def engine(model: ResolvedModel, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    cache = tmp_path_factory.mktemp("cache")
    return Engine(EngineConfig(device=CARD, models={model.source.weights: model.source}, machine_cache=cache))


def batch(model: ResolvedModel, *seeds: int, size: int | None = None, num_frames: int = 17) -> Batch:
    jobs = [
        make_job(model, id=f"clip-{seed}", seed=seed, prompt=f"a red circle {seed}", num_frames=num_frames)
        for seed in seeds
    ]
    return make_batch(model, *jobs, size=size)


def allocations() -> tuple[int, int]:
    stats = torch.cuda.memory_stats(CARD)
    return stats["num_device_alloc"], stats["reserved_bytes.all.current"]


def test_after_a_buckets_first_batch_the_card_is_asked_for_no_more_memory(
    engine: Engine, model: ResolvedModel
) -> None:
    batches = [batch(model, first, first + 1) for first in (0, 10, 20, 30)]
    jobs = [job for each in batches for job in each.jobs]
    engine.encode(batches[0].bucket, [text for job in jobs for text in (job.prompt, job.negative_prompt)])
    engine.render(batches[0])
    before = allocations()
    for each in batches[1:]:
        engine.render(each)
        assert allocations() == before


def test_after_a_buckets_first_batch_nothing_is_compiled(
    engine: Engine, model: ResolvedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    engine.render(batch(model, 1, 2, 3, num_frames=13))
    before = compiled()
    for first in (20, 30):
        engine.render(batch(model, first, first + 1, first + 2, num_frames=13))
    assert compiled() == before
    assert "were compiled" not in capfd.readouterr().err


def test_replayed_kernels_give_the_bits_of_the_first_calls(engine: Engine, model: ResolvedModel) -> None:
    """A batch's first steps run kernel by kernel, its later ones and the next batch from the recording."""
    first, again = (engine.render(batch(model, 1, 2, num_frames=13)).clips for _ in range(2))
    for clip, other in zip(first, again, strict=True):
        assert np.array_equal(clip.frames, other.frames)


def test_a_job_alone_in_its_padded_batch_has_the_pixels_of_the_full_one(
    engine: Engine, model: ResolvedModel
) -> None:
    full = {clip.job_id: clip.frames for clip in engine.render(batch(model, 1, 2, 3, 4)).clips}
    (alone,) = engine.render(batch(model, 3, size=4)).clips
    assert np.array_equal(alone.frames, full["clip-3"])


def test_two_buckets_in_turn_keep_their_pixels(engine: Engine, model: ResolvedModel) -> None:
    one, other = batch(model, 1, 2), batch(model, 1, 2, num_frames=9)
    rendered = [engine.render(each).clips for each in (one, other, one, other)]
    for early, late in ((0, 2), (1, 3)):
        for clip, again in zip(rendered[early], rendered[late], strict=True):
            assert np.array_equal(clip.frames, again.frames)


def test_a_recording_takes_new_inputs_and_keeps_each_shape_apart() -> None:
    recorded = Recorded(lambda x, y: (x * y + 1,), enabled=True)
    for size in (3, 5, 3, 3, 5, 5, 3):
        x, y = torch.randn(size, device=CARD), torch.randn(size, device=CARD)
        assert torch.equal(recorded(x, y)[0], x * y + 1)


@pytest.mark.parametrize("shape", [(1, 300, 2, 128), (2, 77, 3, 64)], ids=str)
def test_every_attention_library_computes_attention(shape: tuple[int, int, int, int]) -> None:
    fused = torch.randn((*shape[:2], 3, *shape[2:]), device=CARD, dtype=torch.bfloat16)
    q, k, v = fused.unbind(2)
    truth = attention(q.double(), k.double(), v.double(), backend=TORCH)
    allowed = (attention(q, k, v, backend=TORCH).double() - truth).norm()
    for backend in available_backends(CARD, dtype=torch.bfloat16):
        assert (attention(q, k, v, backend=backend).double() - truth).norm() <= 2 * allowed + 1e-6


def test_flash_attention_given_an_even_number_of_blocks_computes_the_same_attention() -> None:
    num_tokens = 41 * 128 - 3
    rows = query_rows(num_tokens, backend=FLASH3)
    assert rows > num_tokens
    q, k, v = (torch.randn(1, rows, 2, 128, device=CARD, dtype=torch.bfloat16) for _ in range(3))
    k, v = k[:, :num_tokens], v[:, :num_tokens]
    q[:, num_tokens:] = torch.nan
    if FLASH3 not in available_backends(CARD, dtype=torch.bfloat16):
        return  # a card or an installation without it never pads
    truth = attention(q[:, :num_tokens].double(), k.double(), v.double(), backend=TORCH)
    allowed = (attention(q[:, :num_tokens], k, v, backend=TORCH).double() - truth).norm()
    mixed = attention(q, k, v, backend=FLASH3)[:, :num_tokens]
    assert (mixed.double() - truth).norm() <= 2 * allowed + 1e-6


def test_a_choice_is_measured_once_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "attention.json"
    shape = (1, 512, 2, 128)
    chosen = choose_backend(shape, dtype=torch.bfloat16, device=CARD, file=file)
    (key,) = json.loads(file.read_text())
    file.write_text(json.dumps({key: TORCH}))
    assert choose_backend(shape, dtype=torch.bfloat16, device=CARD, file=file) == TORCH
    file.write_text("{")
    assert choose_backend(shape, dtype=torch.bfloat16, device=CARD, file=file) in available_backends(
        CARD, dtype=torch.bfloat16
    )
    assert chosen in available_backends(CARD, dtype=torch.bfloat16)


def test_in_half_precision_a_clip_is_as_near_to_full_precision_as_half_precision_allows(
    engine: Engine, model: ResolvedModel
) -> None:
    """The same job in fp32 on the card and in bf16: the same clip to the eye."""
    exact = Engine(replace(engine.config, dtype="float32"))
    (half,) = engine.render(batch(model, 5)).clips
    (full,) = exact.render(batch(model, 5)).clips
    assert half.frames is not None
    assert full.frames is not None
    error = half.frames.astype(float) - full.frames
    assert 10 * np.log10(255**2 / (error**2).mean()) > 25


def test_the_allocators_segments_grow(engine: Engine) -> None:
    assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]


@pytest.mark.parametrize("count", [20, 127, 128, 250, 512])
def test_text_attention_of_more_queries_than_programs_take_at_once(count: int) -> None:
    heads, rows = 24, 512
    q, q_weight = (
        rand(*size, seed=1, dtype=torch.bfloat16, device=CARD) for size in ((1, 5001, 3072), (3072,))
    )
    k, v = (rand(1, rows, heads, 128, seed=seed, dtype=torch.bfloat16, device=CARD) for seed in (2, 3))
    k[:, count + 1 :] = v[:, count + 1 :] = torch.nan
    counts = torch.tensor([count], dtype=torch.int32, device=CARD)
    ours = text_attention(q, k, v, counts, q_weight=q_weight, eps=EPS).float()
    truth = plain_text_attention(*(x.float() for x in (q, k, v)), counts, q_weight, EPS)
    assert (ours - truth).norm() < 0.01 * truth.norm()
