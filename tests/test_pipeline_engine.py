"""The engine against the diffusers pipeline itself, called as its documentation shows, in fp32 on the CPU."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline

from manifests.errors import NonFiniteOutput, OutOfDeviceMemory
from manifests.job import Batch, Job
from pipeline import engine as engine_module
from pipeline.config import EngineConfig
from pipeline.engine import Engine, build_engine, finished_clip
from pipeline.frames import to_frames
from pipeline.kernels.triton_jit import Compiled
from pipeline.models.protocol import Piece, joined
from pipeline.models.resolve import ResolvedModel, resolve_model
from pipeline.models.wan import WanModel
from pipeline.models.wan_transformer import WanTransformer
from pipeline.rendering import StageTimes
from pipeline.timing import StageClock
from tests.pipeline_checkpoints import (
    LONG,
    SHORT,
    build_checkpoint,
    make_batch,
    make_engine,
    make_job,
    reference_video,
)

KINDS = ("t2v", "ti2v", "a14b")
ONE_LEVEL = 1 / 255


class Case:
    """One checkpoint: our engine over it and the diffusers pipeline over it."""

    def __init__(self, folder: Any, kind: str) -> None:
        self.model: ResolvedModel = resolve_model(str(build_checkpoint(folder, kind)))
        self.engine: Engine = make_engine(self.model)
        self.pipeline = WanPipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.pipeline.set_progress_bar_config(disable=True)

    def reference(self, job: Job) -> torch.Tensor:
        bucket = make_batch(self.model, job).bucket
        size = {"width": bucket.width, "height": bucket.height, "num_frames": bucket.num_frames}
        return reference_video(self.pipeline, job, **size)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {kind: Case(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


@pytest.fixture
def t2v(cases: dict[str, Case]) -> Case:
    return cases["t2v"]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The RGB of every clip the engine decodes, in order."""
    videos: list[torch.Tensor] = []
    decode = WanModel.decode

    def kept(self: WanModel, latents: torch.Tensor) -> Iterator[Piece]:
        pieces = list(decode(self, latents))
        videos.append(joined(pieces))
        return iter(pieces)

    monkeypatch.setattr(WanModel, "decode", kept)
    return videos


@pytest.fixture
def velocity_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The expert of every velocity that is computed, in the order in which experts come to work."""
    calls: list[int] = []
    experts: list[WanTransformer] = []
    forward = WanTransformer.__call__

    def counted(self: WanTransformer, *args: Any, **settings: Any) -> list[torch.Tensor]:
        if self not in experts:
            experts.append(self)
        calls.extend([experts.index(self)] * len(settings["texts"]))
        return forward(self, *args, **settings)

    monkeypatch.setattr(WanTransformer, "__call__", counted)
    return calls


def four_jobs(model: ResolvedModel) -> list[Job]:
    prompts = [(SHORT, "blue"), (LONG, "the roof"), ("字🙂", ""), ("blue sky", LONG)]
    return [
        make_job(model, id=f"clip-{seed}", seed=seed, prompt=prompt, negative_prompt=negative)
        for seed, (prompt, negative) in enumerate(prompts)
    ]


def frames_by_id(engine: Engine, batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
    clips = engine.render(batch).clips
    assert [clip.job_id for clip in clips] == [job.id for job in batch.jobs]
    assert all(clip.error is None for clip in clips)
    return {clip.job_id: clip.frames for clip in clips if clip.frames is not None}


def assert_same_video(case: Case, job: Job, rgb: torch.Tensor, frames: np.ndarray[Any, Any]) -> None:
    reference = case.reference(job)
    assert reference.std() > 0.1  # a flat video would hide any mistake
    assert (rgb - reference).abs().max() <= ONE_LEVEL
    expected = to_frames(reference, width=job.width, height=job.height, num_frames=job.num_frames)
    assert np.abs(frames.astype(int) - expected).max() <= 1


def test_a_job_alone_renders_as_diffusers_does(case: Case, decoded: list[torch.Tensor]) -> None:
    job = make_job(case.model, prompt=LONG)
    frames = frames_by_id(case.engine, make_batch(case.model, job))
    assert_same_video(case, job, decoded[0], frames[job.id])


def test_each_job_of_a_full_batch_renders_as_diffusers_renders_it_alone(
    case: Case, decoded: list[torch.Tensor]
) -> None:
    jobs = four_jobs(case.model)
    frames = frames_by_id(case.engine, make_batch(case.model, *jobs))
    for job, rgb in zip(jobs, decoded, strict=True):
        assert_same_video(case, job, rgb, frames[job.id])


def test_padding_changes_nothing_and_is_not_decoded(case: Case, decoded: list[torch.Tensor]) -> None:
    jobs = four_jobs(case.model)[:2]
    frames = frames_by_id(case.engine, make_batch(case.model, *jobs, size=4))
    for job, rgb in zip(jobs, decoded, strict=True):
        assert_same_video(case, job, rgb, frames[job.id])


def test_neighbours_and_order_do_not_change_a_clip(case: Case) -> None:
    jobs = four_jobs(case.model)
    forward = frames_by_id(case.engine, make_batch(case.model, *jobs))
    backward = frames_by_id(case.engine, make_batch(case.model, *reversed(jobs)))
    padded = frames_by_id(case.engine, make_batch(case.model, jobs[2], size=4))
    for job in jobs:
        assert np.array_equal(forward[job.id], backward[job.id])
    assert np.array_equal(padded[jobs[2].id], forward[jobs[2].id])


def test_more_steps_another_shift_and_a_wide_clip_render_as_diffusers_does(
    case: Case, decoded: list[torch.Tensor]
) -> None:
    job = make_job(case.model, width=96, height=32, num_frames=5, steps=7, flow_shift=8.0)
    frames = frames_by_id(case.engine, make_batch(case.model, job))
    assert_same_video(case, job, decoded[0], frames[job.id])


def test_flow_shift_reaches_the_sampler(t2v: Case) -> None:
    low, high = (
        frames_by_id(t2v.engine, make_batch(t2v.model, make_job(t2v.model, flow_shift=shift)))["clip"]
        for shift in (1.5, 8.0)
    )
    assert np.abs(low.astype(int) - high).max() > 5


def test_guidance_of_one_makes_half_the_model_calls(
    case: Case, velocity_calls: list[int], decoded: list[torch.Tensor]
) -> None:
    job = make_job(case.model, guidance_scale=1.0)
    frames = frames_by_id(case.engine, make_batch(case.model, job))
    assert len(velocity_calls) == job.steps
    assert_same_video(case, job, decoded[0], frames[job.id])

    velocity_calls.clear()
    guided = frames_by_id(case.engine, make_batch(case.model, make_job(case.model, guidance_scale=5.0)))
    assert len(velocity_calls) == 2 * job.steps
    assert np.abs(guided[job.id].astype(int) - frames[job.id]).max() > 5


def test_both_experts_take_their_steps_and_their_guidance(
    cases: dict[str, Case], velocity_calls: list[int], decoded: list[torch.Tensor]
) -> None:
    case = cases["a14b"]
    job = make_job(case.model, steps=6, guidance_scale=2.0, guidance_scale_2=7.0)
    frames = frames_by_id(case.engine, make_batch(case.model, job))
    assert velocity_calls == sorted(velocity_calls)
    assert set(velocity_calls) == {0, 1}
    assert_same_video(case, job, decoded[0], frames[job.id])

    other = make_job(case.model, steps=6, guidance_scale=2.0, guidance_scale_2=2.0)
    changed = frames_by_id(case.engine, make_batch(case.model, other))
    assert np.abs(changed[job.id].astype(int) - frames[job.id]).max() > 5


def test_the_second_expert_may_go_unguided(cases: dict[str, Case], velocity_calls: list[int]) -> None:
    case = cases["a14b"]
    job = make_job(case.model, guidance_scale=4.0, guidance_scale_2=1.0)
    frames_by_id(case.engine, make_batch(case.model, job))
    assert velocity_calls.count(0) % 2 == 0
    assert velocity_calls.count(0) // 2 + velocity_calls.count(1) == job.steps


def test_odd_sizes_are_cropped_to_their_middle_and_frames_trimmed(
    case: Case, decoded: list[torch.Tensor]
) -> None:
    job = make_job(case.model, width=250, height=130, num_frames=15, steps=1)
    frames = frames_by_id(case.engine, make_batch(case.model, job))[job.id]
    assert frames.shape == (15, 130 * 3 // 2, 250)
    rendered = decoded[0]
    assert rendered.shape[1] == 17
    top, left = (rendered.shape[2] - 130) // 2, (rendered.shape[3] - 250) // 2
    middle = rendered[:, :15, top : top + 130, left : left + 250]
    assert np.array_equal(frames, to_frames(middle, width=250, height=130, num_frames=15))


def test_a_single_frame_renders(case: Case, decoded: list[torch.Tensor]) -> None:
    job = make_job(case.model, num_frames=1)
    frames = frames_by_id(case.engine, make_batch(case.model, job))
    assert_same_video(case, job, decoded[0], frames[job.id])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_clip_fails_alone(case: Case, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    jobs = four_jobs(case.model)
    clean = frames_by_id(case.engine, make_batch(case.model, *jobs))
    draw = engine_module.initial_noise

    def spoilt(*arguments: Any, **settings: Any) -> torch.Tensor:
        noise = draw(*arguments, **settings)
        noise[2, 0, 0, 0, 0] = value
        return noise

    monkeypatch.setattr(engine_module, "initial_noise", spoilt)
    clips = case.engine.render(make_batch(case.model, *jobs)).clips
    assert [clip.error is None for clip in clips] == [True, True, False, True]
    assert clips[2].frames is None
    assert isinstance(clips[2].error, NonFiniteOutput)
    assert str(clips[2].error).startswith("non-finite output: ")
    for clip in (clips[0], clips[1], clips[3]):
        assert np.array_equal(clip.frames, clean[clip.job_id])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_latent_counts_even_where_the_decoder_clamps_it(value: float) -> None:
    class Clamping:
        def decode(self, latents: torch.Tensor) -> Iterator[Piece]:
            yield Piece.of_whole(torch.ones(3, 9, 64, 64))

    job = make_job(resolve_model("builtin"))
    latents = torch.zeros(1, 4, 3, 8, 8)
    assert finished_clip(Clamping(), job, latents).error is None
    latents[0, 0, 0, 0, 0] = value
    assert isinstance(finished_clip(Clamping(), job, latents).error, NonFiniteOutput)


def test_out_of_device_memory_is_told_apart_and_leaves_the_engine_usable(
    t2v: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: WanModel, latents: torch.Tensor) -> Iterator[Piece]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore of it")

    batch = make_batch(t2v.model, *four_jobs(t2v.model))
    with monkeypatch.context() as patch:
        patch.setattr(WanModel, "decode", full)
        with pytest.raises(OutOfDeviceMemory, match=r"4 clips of 64x64x9 4 steps: CUDA out of memory"):
            t2v.engine.render(batch)
    assert len(frames_by_id(t2v.engine, batch)) == 4


def test_other_errors_of_a_model_keep_their_type(t2v: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: WanModel, latents: torch.Tensor) -> Iterator[Piece]:
        raise ArithmeticError("device-side assert")

    monkeypatch.setattr(WanModel, "decode", broken)
    with pytest.raises(ArithmeticError, match="device-side assert"):
        t2v.engine.render(make_batch(t2v.model, make_job(t2v.model)))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    encode = WanModel.encode

    def counted(self: WanModel, prompts: Sequence[str]) -> list[torch.Tensor]:
        texts.extend(prompts)
        return encode(self, prompts)

    monkeypatch.setattr(WanModel, "encode", counted)
    return texts


def test_each_distinct_prompt_is_encoded_once_for_all_batches(t2v: Case, encoded: list[str]) -> None:
    engine = make_engine(t2v.model)
    jobs = [make_job(t2v.model, id=str(seed), seed=seed) for seed in range(3)]
    engine.render(make_batch(t2v.model, *jobs, size=4))
    engine.render(make_batch(t2v.model, jobs[1]))
    assert sorted(encoded) == ["blue", SHORT]


def test_unguided_clips_do_not_encode_a_negative_prompt(t2v: Case, encoded: list[str]) -> None:
    make_engine(t2v.model).render(make_batch(t2v.model, make_job(t2v.model, guidance_scale=1.0)))
    assert encoded == [SHORT]


def test_one_engine_serves_two_models_in_turn(cases: dict[str, Case]) -> None:
    first, second = cases["t2v"], cases["ti2v"]
    models = {case.model.source.weights: case.model.source for case in (first, second)}
    engine = build_engine(EngineConfig(device="cpu", models=models))
    for case in (first, second, first):
        batch = make_batch(case.model, make_job(case.model))
        alone = frames_by_id(case.engine, batch)["clip"]
        assert np.array_equal(frames_by_id(engine, batch)["clip"], alone)


def test_times_and_memory_are_reported_and_loading_is_told_apart(t2v: Case) -> None:
    engine = make_engine(t2v.model)
    batch = make_batch(t2v.model, make_job(t2v.model))
    first, second = engine.render(batch), engine.render(batch)
    assert min(first.times.load_s, first.times.encode_s, first.times.denoise_s, first.times.decode_s) > 0
    assert second.times.load_s < first.times.load_s / 10
    assert first.peak_memory_bytes > 10_000_000
    assert engine.gpu_name


def test_a_worker_can_be_sent_what_builds_its_engine(t2v: Case) -> None:
    config = EngineConfig(device="cpu", models={t2v.model.source.weights: t2v.model.source})
    build, sent = pickle.loads(pickle.dumps((build_engine, config)))
    assert sent == config
    assert isinstance(build(sent), Engine)


def test_a_kernel_compiled_for_a_bucket_that_was_rendered_before_is_reported(
    t2v: Case, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(t2v.model)
    counts = iter([3, 0, 2])
    monkeypatch.setattr(StageClock, "compiled", lambda clock: Compiled(next(counts)))
    monkeypatch.setattr(StageClock, "times", lambda clock: StageTimes())
    said = []
    for _ in range(3):
        engine.render(make_batch(t2v.model, make_job(t2v.model)))
        said.append("kernels were compiled" in capfd.readouterr().err)
    assert said == [False, False, True]
