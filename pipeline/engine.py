"""The engine: a batch of jobs in, finished frames out.

Shapes: B clips, C latent channels, T latent frames, H and W sides (of latents, or of pictures with F frames).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from manifests.errors import NonFiniteOutput, OutOfDeviceMemory
from manifests.job import Batch, Bucket, Job
from manifests.presets import EXACT
from manifests.wording import counted
from pipeline.config import EngineConfig, ModelSource, resolved
from pipeline.devices import device_name, let_segments_grow
from pipeline.embeddings import encoder_revision
from pipeline.frames import FrameCollector
from pipeline.graph.attention_choice import backend_chooser
from pipeline.memory.stepping import sample_batch, time_steps
from pipeline.models.protocol import VideoModel
from pipeline.models.wan import load_wan
from pipeline.models.wan_vae.causal import plain_conv
from pipeline.prompts import PromptCache
from pipeline.rendering import RenderedClip, Rendering, StepTimes
from pipeline.sampling.noise import initial_noise
from pipeline.sampling.samplers import Sampler, boundary_timestep, make_sampler, num_train_timesteps
from pipeline.sampling.schedules import Step, make_schedule
from pipeline.sampling.velocity import Forwards, PlainVelocity, SparseIn, VelocityOf, always_dense
from pipeline.timing import StageClock

if TYPE_CHECKING:
    from pipeline.approx.presets import Approximation
    from pipeline.models.wan_transformer import Convert
    from pipeline.models.wan_vae.causal import MakeConv

T = TypeVar("T")


def build_engine(config: EngineConfig) -> Engine:
    """A module-level function, so that a spawned worker can be told to call it."""
    return Engine(config)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model in memory. fp8: its blocks are in 8 bits, the decoder's too, as far as the device has them."""

    source: ModelSource
    model: VideoModel
    fp8: bool = False


class Engine:
    """A Renderer, and a Prober, with one model loaded at a time.

    loaded: the model to begin with, where it is in memory already. approximation: in place of what presets
    are made of, for a bench.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        loaded: Loaded | None = None,
        approximation: Approximation | None = None,
    ) -> None:
        self.config = resolved(config)
        self.gpu_name = device_name(config.device)
        self._backend_of = backend_chooser(
            dtype=getattr(torch, self.config.dtype),
            device=config.device,
            file=self.config.attention_choices,
        )
        self._loaded = loaded
        self.approximation = approximation
        self._rendered: set[tuple[str, int]] = set()
        self._prompts = PromptCache(self.config.embeddings)
        torch.backends.cudnn.deterministic = True
        if self.config.device != "cpu":
            let_segments_grow()
            torch.cuda.set_device(self.config.device)  # or the first card would hold a context for nothing

    def render(self, batch: Batch) -> Rendering:
        """Raises OutOfDeviceMemory when the batch does not fit, ModelError when weights cannot be fetched."""
        return _within_memory(self._render, batch, device=self.config.device)

    @torch.inference_mode()
    def encode(self, bucket: Bucket, texts: Sequence[str]) -> None:
        """Prompts of coming batches: the text encoder comes to the device once for all of them."""
        self._prompts.encode(self._model(bucket), texts, encoder=self._encoder(bucket))

    def probe(self, bucket: Bucket, *, size: int) -> StepTimes:
        """How long a step of `size` clips takes. Raises as `render` does."""
        return _within_memory(self._probe, sample_batch(bucket, size=size), device=self.config.device)

    @torch.inference_mode()
    def _render(self, batch: Batch) -> Rendering:
        clock = StageClock(self.config.device)
        with clock.stage("load_s"):
            model = self._model(batch.bucket)
        with clock.stage("encode_s"):
            prompts, negatives = self._encode(model, batch)
        with clock.stage("denoise_s"):
            latents_BCTHW, forwards = self._denoise(model, batch, prompts, negatives)
        with clock.stage("decode_s"):
            # One by one: neither memory nor result depends on the neighbours, and padding costs nothing.
            clips = tuple(
                finished_clip(model, job, latents_BCTHW[index : index + 1])
                for index, job in enumerate(batch.jobs)
            )
        self._note_compiled(batch, clock.compiled().num_kernels)
        return Rendering(
            clips=clips,
            times=clock.times(),
            peak_memory_bytes=clock.peak_memory_bytes(),
            steps_computed=forwards.computed,
            steps_skipped=forwards.skipped,
        )

    def _note_compiled(self, batch: Batch, num_kernels: int) -> None:
        """Shapes are static, so a bucket's first batch of a size compiles all that the next ones launch."""
        static = (batch.bucket.key, batch.size)
        if static in self._rendered and num_kernels:
            print(
                f"warning: {num_kernels} kernels were compiled for {batch.bucket.label}, "
                "though a batch like it was rendered before",
                file=sys.stderr,
            )
        self._rendered.add(static)

    @torch.inference_mode()
    def _probe(self, batch: Batch) -> StepTimes:
        model = self._model(batch.bucket)
        prompts, negatives = self._encode(model, batch)
        return time_steps(model, batch.bucket, prompts, negatives, device=self.config.device)

    def _model(self, bucket: Bucket) -> VideoModel:
        source = self._source(bucket)
        assert source.revision == bucket.revision, (source, bucket)
        approximation = self._approximation(bucket)
        fp8 = approximation is not None and approximation.fp8
        known = self._loaded
        if known is not None and (known.source, known.fp8) != (source, fp8):
            self._loaded = None  # the old weights must go before the new ones come
            is_same = known.source.has_checkpoint_of(source) and known.fp8 == fp8
            if is_same and known.model.use_loras(source.loras):
                self._loaded = replace(known, source=source)
        del known
        if self._loaded is None:
            torch.cuda.empty_cache()
            model = load_wan(
                source,
                device=self.config.device,
                dtype=self.config.dtype,
                vae_dtype=self.config.vae_dtype,
                backend_of=self._backend_of,
                convert=self._fp8_convert() if fp8 else None,
                make_conv=self._fp8_conv_maker() if fp8 else plain_conv,
            )
            self._loaded = Loaded(source=source, model=model, fp8=fp8)
        return self._loaded.model

    def _approximation(self, bucket: Bucket) -> Approximation | None:
        if self.approximation is not None:
            return self.approximation
        if bucket.preset == EXACT:
            return None
        from pipeline.approx.presets import approximation_of

        return approximation_of(bucket.preset)

    def _fp8_convert(self) -> Convert | None:
        from pipeline.approx.fp8 import fp8_convert, fp8_support

        return fp8_convert(fp8_support(self.config.device, dtype=getattr(torch, self.config.dtype)))

    def _fp8_conv_maker(self) -> MakeConv:
        from pipeline.approx.fp8_decoder import fp8_conv_maker

        return fp8_conv_maker(self.config.device, dtype=getattr(torch, self.config.vae_dtype))

    def _source(self, bucket: Bucket) -> ModelSource:
        return self.config.models[bucket.weights]

    def _encode(self, model: VideoModel, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Prompts and negative prompts of every slot; no negatives where nothing is guided."""
        jobs = slots(batch)
        negatives = jobs if batch.bucket.is_guided else []
        texts = [*(job.prompt for job in jobs), *(job.negative_prompt for job in negatives)]
        encoded = self._prompts.encode(model, texts, encoder=self._encoder(batch.bucket))
        return encoded[: len(jobs)], encoded[len(jobs) :]

    def _encoder(self, bucket: Bucket) -> str:
        revision = self._source(bucket).base_revision  # LoRAs change no text encoder
        return encoder_revision(revision, dtype=self.config.dtype, device_name=self.gpu_name)

    def _denoise(
        self,
        model: VideoModel,
        batch: Batch,
        prompts: Sequence[torch.Tensor],
        negatives: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, Forwards]:
        bucket = batch.bucket
        shape = model.latent_shape(width=bucket.width, height=bucket.height, num_frames=bucket.num_frames)
        model.lay_out(shape)
        seeds = [job.seed for job in slots(batch)]
        noise_BCTHW = initial_noise(seeds, shape_CTHW=shape)
        recipe = self._source(bucket).recipe
        sampler = make_sampler(
            model.scheduler_config,
            recipe=recipe,
            flow_shift=bucket.flow_shift,
            steps=bucket.steps,
            seeds=seeds,
            device=self.config.device,
        )
        schedule = make_schedule(
            sampler.timesteps,
            boundary_timestep=boundary_timestep(model.scheduler_config, model.boundary_timestep, recipe),
            guidance_scale=bucket.guidance_scale,
            guidance_scale_2=bucket.guidance_scale_2,
            num_train_timesteps=num_train_timesteps(model.scheduler_config),
        )
        forwards = Forwards()
        latents_BCTHW = denoise(
            model,
            noise_BCTHW.to(self.config.device),
            schedule,
            sampler,
            prompts,
            negatives,
            velocity_of=self._velocity_of(bucket, num_steps=len(schedule), forwards=forwards),
        )
        return latents_BCTHW, forwards

    def _velocity_of(self, bucket: Bucket, *, num_steps: int, forwards: Forwards) -> VelocityOf:
        approximation = self._approximation(bucket)
        if approximation is None:
            return partial(PlainVelocity, forwards=forwards)
        sparse_in = _sparse_in(num_steps) if approximation.sparse_attention else always_dense
        if not approximation.changes_steps:
            return partial(PlainVelocity, forwards=forwards, sparse_in=sparse_in)
        from pipeline.approx.steps import ApproximateVelocity

        return partial(
            ApproximateVelocity,
            approximation=approximation,
            num_steps=num_steps,
            forwards=forwards,
            sparse_in=sparse_in,
        )


def _sparse_in(num_steps: int) -> SparseIn:
    from pipeline.approx.sparse_attention import sparse_in

    return partial(sparse_in, num_steps=num_steps)


def _within_memory(work: Callable[[Batch], T], batch: Batch, *, device: str) -> T:
    try:
        return work(batch)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
    # Past the handler, where nothing holds the failed batch's tensors any more: its halves need the room.
    torch.cuda.empty_cache()
    raise OutOfDeviceMemory(
        f"{device} has too little memory for {counted(batch.size, 'clip')} of {batch.bucket.label}: {reason}",
        hint="ask for a smaller size or fewer frames",
    )


def slots(batch: Batch) -> list[Job]:
    """The batch's jobs, padded to its size with copies of the first."""
    return [*batch.jobs, *[batch.jobs[0]] * (batch.size - len(batch.jobs))]


def denoise(
    model: VideoModel,
    latents_BCTHW: torch.Tensor,
    schedule: Sequence[Step],
    sampler: Sampler,
    prompts: Sequence[torch.Tensor],
    negatives: Sequence[torch.Tensor],
    *,
    velocity_of: VelocityOf = PlainVelocity,
) -> torch.Tensor:
    """From noise to clean latents, in fp32, through the experts in turn.

    velocity_of: from an expert's denoiser, and its last step, to the velocity of each of its steps.
    """
    for expert, group in itertools.groupby(schedule, key=lambda step: step.expert):
        steps = list(group)
        timesteps = torch.stack([step.timestep for step in steps])
        denoiser = model.denoiser(prompts, negatives, timesteps=timesteps, expert=expert)
        velocity = velocity_of(denoiser, last_index=steps[-1].index)
        for own_index, step in enumerate(steps):
            velocity_BCTHW = velocity(latents_BCTHW, own_index=own_index, step=step)
            latents_BCTHW = sampler.step(velocity_BCTHW, index=step.index, latents_BCTHW=latents_BCTHW)
    return latents_BCTHW


def finished_clip(model: VideoModel, job: Job, latents_1CTHW: torch.Tensor) -> RenderedClip:
    """Decode one clip to what its job asked for, or say that its numbers are not numbers."""
    collector = FrameCollector(
        width=job.width, height=job.height, num_frames=job.num_frames, device=str(latents_1CTHW.device)
    )
    # The latents too, as the decoder clamps: an infinite one could come out as a plain white frame.
    num_wrong = _num_not_finite(latents_1CTHW)
    for piece in model.decode(latents_1CTHW):
        num_wrong += _num_not_finite(piece.rgb_3FHW)
        collector.add(piece)
    frames = collector.frames()
    if num_wrong > 0:
        error = NonFiniteOutput(
            f"non-finite output: {counted(int(num_wrong), 'value')}",
            hint="try another seed or a lower guidance_scale",
        )
        return RenderedClip(job_id=job.id, frames=None, error=error)
    return RenderedClip(job_id=job.id, frames=frames)


def _num_not_finite(values: torch.Tensor) -> torch.Tensor:
    """On the device, so that nothing waits for it before the clip's end."""
    return (~values.isfinite()).sum()
