"""Every stage on the CPU, over Wan2.2's structure and over Wan2.1's with two experts, as small as they go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from manifests.errors import OutOfDeviceMemory
from pipeline.approx.sparse_attention import BlockSparseAttention
from pipeline.bench import approximate, clips, ours, reference, stages
from pipeline.bench.clips import Mp4
from pipeline.bench.clock import Clock
from pipeline.bench.results import DIFFUSERS, OURS, OURS_BY_FRAME, OURS_FP8, OURS_SPARSE, TUNED
from pipeline.bench.setting import Setting, guided_inputs, noise
from pipeline.bench.stages import run_stage
from pipeline.bench.weights import RandomWeights
from pipeline.kernels.attention import TORCH, attention
from pipeline.models.shapes import TINY, Shape
from tests.test_pipeline_bench_operations import TINY_21_VAE

TWO_EXPERTS = replace(
    TINY,
    name="two experts",
    vae=TINY_21_VAE,
    expand_timesteps=False,
    boundary_ratio=0.875,
    guidance_scale_2=3.0,
)
SHAPES = pytest.mark.parametrize("shape", [TINY, TWO_EXPERTS], ids=lambda shape: shape.name)


def setting_of(shape: Shape, **changes: Any) -> Setting:
    setting = Setting(
        weights=RandomWeights(shape),
        device="cpu",
        width=2 * shape.patch_pixels,
        height=shape.patch_pixels,
        num_frames=5,
        steps=3,
        seconds=0.0,
        say=lambda text: None,
    )
    return replace(setting, **changes)


@SHAPES
def test_both_sides_compute_the_same_step(shape: Shape) -> None:
    result = run_stage("forward", setting_of(shape))
    assert [column.name for column in result.columns] == [DIFFUSERS, TUNED, OURS, OURS_FP8]
    # Too few channels for tensor cores in 8 bits: there the last column is exact as well.
    assert all(column.facts["relative_difference"] < 1e-5 for column in result.columns[1:])
    assert result.operations is not None
    assert result.matmul_tflops is not None
    assert all(len(column.samples_ms) >= 1 for column in result.columns)


def test_clips_that_are_long_enough_have_a_column_of_sparse_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def counted(self: BlockSparseAttention, *qkv: torch.Tensor) -> torch.Tensor:
        calls.append(qkv[0].shape[1])
        return attention(*qkv, backend=TORCH)

    monkeypatch.setattr(BlockSparseAttention, "__call__", counted)
    setting = setting_of(TINY)
    for num_tokens, columns in ((setting.num_tokens, [OURS_SPARSE]), (setting.num_tokens + 1, [])):
        sparse = partial(BlockSparseAttention, least_tokens=num_tokens)
        monkeypatch.setattr(stages, "BlockSparseAttention", sparse)
        result = run_stage("forward", setting)
        assert [column.name for column in result.columns][4:] == columns
        assert bool(calls) == bool(columns)
        calls.clear()
        for column in result.columns[4:]:
            assert column.facts["density"] == sparse().density
            assert column.facts["relative_difference"] < 1e-5  # in another order


@SHAPES
def test_both_sides_decode_to_the_same_video(shape: Shape) -> None:
    result = run_stage("decode", setting_of(shape))
    assert [column.name for column in result.columns] == [DIFFUSERS, TUNED, OURS, OURS_BY_FRAME, OURS_FP8]
    *exact, in_8_bits = (column.facts["relative_difference"] for column in result.columns[1:])
    assert max(exact) < 1e-5 < in_8_bits < 0.1


def test_the_reference_step_is_what_the_pipeline_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loop, stopped after one step, gives the transformer the same inputs."""
    setting = setting_of(TINY, steps=1)
    parts = replace(
        clips.load_parts(setting.weights, device="cpu", dtype=torch.float32),
        text_encoder=None,
        tokenizer=None,
    )
    module, seen = parts.experts[0], []
    forward = module.forward

    def recorded(**arguments: Any) -> Any:
        seen.append(arguments)
        return forward(**arguments)

    monkeypatch.setattr(module, "forward", recorded)
    inputs = guided_inputs(setting)
    pipeline = reference.plain_pipeline(setting, parts)
    texts = [reference._zero_padded(text) for text in (inputs.prompt_LE, inputs.negative_LE)]
    reference.clip(pipeline, setting, prompt_embeds=texts[0], negative_prompt_embeds=texts[1])()
    timestep = pipeline.scheduler.timesteps[0]
    inputs = replace(inputs, timestep=timestep)
    reference.guided_step(module, inputs, expand_timesteps=True)()
    assert len(seen) == 4
    for theirs, own in zip(seen[:2], seen[2:], strict=True):
        assert torch.equal(theirs["hidden_states"], own["hidden_states"])
        assert torch.equal(theirs["encoder_hidden_states"], own["encoder_hidden_states"])
        assert torch.equal(theirs["timestep"], own["timestep"])


def test_the_tuned_transformer_shares_weights_and_leaves_the_plain_one_alone() -> None:
    module = RandomWeights(TINY).transformer(0, device="cpu", dtype=torch.float32)
    twin = reference.tuned(module, attention="_native_math")
    for parameter, shared in zip(module.parameters(), twin.parameters(), strict=True):
        assert parameter is shared
    assert all(block._compiled_call_impl is None for block in module.blocks)
    assert all(block._compiled_call_impl is not None for block in twin.blocks)
    backends = [each.blocks[0].attn1.processor._attention_backend for each in (module, twin)]
    assert [backend.value for backend in backends] == ["native", "_native_math"]


def test_an_attention_that_this_machine_lacks_is_passed_over_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "_ATTENTIONS_ON_CPU", ("_flash_3", "_native_cudnn", "native"))
    fastest, tried = reference.fastest_attention(setting_of(TINY), Clock("cpu"))
    assert fastest == "native"
    assert isinstance(tried["native"], float)
    assert all("Error" in tried[name] for name in ("_flash_3", "_native_cudnn"))


def test_small_clips_are_timed_alone_and_by_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "SMALL_CAP", 3)
    monkeypatch.setattr(clips, "SMALL_LATENTS", (2, 2, 2))
    batches: list[int] = []
    render = ours.Engine.render

    def counted(self: Any, batch: Any) -> Any:
        batches.append(len(batch.jobs))
        return render(self, batch)

    monkeypatch.setattr(ours.Engine, "render", counted)
    result = run_stage("small", setting_of(TWO_EXPERTS))
    assert [column.name for column in result.columns] == [DIFFUSERS, TUNED, OURS]
    assert set(batches) == {3}
    assert "16x16, 5 frames, 2 tokens" in result.timed


@SHAPES
def test_a_clip_of_each_side_is_timed_with_its_file(shape: Shape) -> None:
    written: list[str] = []
    mp4 = Mp4(reference=lambda: written.append("diffusers"), ours=lambda: written.append("ours"))
    result = run_stage("clip", setting_of(shape), mp4=mp4)
    assert written == ["diffusers", "diffusers", "ours"]
    for column in result.columns:
        assert column.samples_ms == (column.facts["render_ms"] + column.facts["mp4_ms"],)
        assert column.facts["render_ms"] > column.facts["mp4_ms"]


def test_every_side_encodes_the_texts_of_its_timed_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = setting_of(TINY)
    text_encoder = setting.weights.text_encoder(device="cpu", dtype=torch.float32)
    encoded: list[list[int]] = []
    forward = text_encoder.forward

    def recorded(input_ids: torch.Tensor, *args: Any, **settings: Any) -> Any:
        encoded.extend(input_ids[:, :12].tolist())
        return forward(input_ids, *args, **settings)

    monkeypatch.setattr(text_encoder, "forward", recorded)
    monkeypatch.setattr(RandomWeights, "text_encoder", lambda self, **settings: text_encoder)
    run_stage("clip", setting, mp4=Mp4(reference=lambda: None, ours=lambda: None))
    assert len(encoded) == 3 * 4
    assert sorted(encoded[:4]) == sorted(encoded[4:8]) == sorted(encoded[8:])
    assert len({tuple(tokens) for tokens in encoded}) == 4


def test_a_steady_run_times_every_clip_of_three_unguided_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "STEADY_CLIPS", 4)
    forwards: list[int] = []
    transformer_call = ours.WanTransformer.__call__

    def counted(self: Any, *args: Any, texts: Any, **settings: Any) -> Any:
        forwards.append(len(texts))
        return transformer_call(self, *args, texts=texts, **settings)

    monkeypatch.setattr(ours.WanTransformer, "__call__", counted)
    result = run_stage("steady", setting_of(TINY))
    (column,) = result.columns
    assert len(column.samples_ms) == 4
    assert forwards == [1] * 3 * (1 + 4)
    assert result.facts == {"gpu_busy_frac": None, "num_kernels": 0}


def test_global_switches_are_as_they_were_after_a_stage() -> None:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = False
    try:
        run_stage("decode", setting_of(TINY))
        assert torch.backends.cudnn.deterministic is False
        seen: list[bool] = []
        vae = RandomWeights(TINY).vae(device="cpu")
        decode: Callable[..., Any] = vae.decode

        def recorded(*args: Any, **settings: Any) -> Any:
            seen.append(torch.backends.cudnn.deterministic)
            return decode(*args, **settings)

        vae.decode = recorded
        reference.decode(vae, noise(setting_of(TINY)))()
        assert seen == [False]
    finally:
        torch.backends.cudnn.deterministic = before


def test_a_device_that_runs_out_of_memory_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(setting: Setting) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB\nand more")

    monkeypatch.setattr(stages, "forward_stage", full)
    with pytest.raises(OutOfDeviceMemory, match="too little memory for stage `forward` of tiny") as raised:
        run_stage("forward", setting_of(TINY))
    assert "and more" not in raised.value.message
    assert "--size" in (raised.value.hint or "")


def test_turbo_takes_clips_from_prompt_to_file_beside_a_scaled_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(approximate, "STEADY_CLIPS", 3)
    times_ms = iter([80.0, 140.0, 7.0])  # one and four steps of diffusers, its file
    # Ours: begun, texts encoded, three files written.
    monkeypatch.setattr(approximate, "perf_counter", iter([50.0, 56.0, 70.0, 75.0, 84.0]).__next__)

    def wall_ms(clock: Clock, call: Callable[[], object]) -> float:
        call()
        return next(times_ms)

    monkeypatch.setattr(Clock, "wall_ms", wall_ms)
    files: list[str] = []
    mp4 = Mp4(reference=lambda: files.append("reference"), ours=lambda: files.append("ours"))
    result = run_stage("turbo", setting_of(TINY, steps=50), mp4=mp4)
    diffusers, turbo = result.columns
    assert files == ["reference", *["ours"] * 3]
    assert diffusers.samples_ms == (140 + 46 * 20 + 7,)
    assert turbo.samples_ms == (7000 + 2000,)
    assert any("scaled from clips of 1 and 4" in note for note in result.notes)
    assert diffusers.facts["render_ms"] + diffusers.facts["mp4_ms"] == pytest.approx(diffusers.median_ms)


def test_fast_is_timed_at_each_share_of_skipped_steps() -> None:
    mp4 = Mp4(reference=lambda: None, ours=lambda: None)
    result = run_stage("fast", setting_of(TINY, steps=20), mp4=mp4)
    assert "one clip of 2 in a row" in result.timed
    assert [column.name for column in result.columns] == [
        "diffusers", "ours 0%", "ours 25%", "ours 50%", "ours 60%"
    ]  # fmt: skip
    _, none, *_, most = result.columns
    assert (none.facts["steps_skipped"], none.facts["steps_computed"]) == (7, 33)
    assert most.facts["steps_skipped"] >= 24
    assert result.facts["headline_frac"] == 0.5
