"""The engine: a batch of jobs in, finished frames out.

Shapes: B clips, C latent channels, T latent frames, H and W sides (of latents, or of pictures with F frames).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from manifests.errors import NonFiniteOutput, OutOfDeviceMemory
from manifests.job import Batch, Bucket, Job
from pipeline.config import EngineConfig, ModelSource, resolved
from pipeline.devices import device_name
from pipeline.frames import to_frames
from pipeline.models.protocol import VideoModel
from pipeline.models.wan import load_wan
from pipeline.prompts import PromptCache
from pipeline.rendering import RenderedClip, Rendering
from pipeline.sampling.guidance import guided, uses_guidance
from pipeline.sampling.noise import initial_noise
from pipeline.sampling.schedules import Step, make_schedule
from pipeline.sampling.steppers import Stepper
from pipeline.timing import StageClock


def build_engine(config: EngineConfig) -> Engine:
    """A module-level function, so that a spawned worker can be told to call it."""
    return Engine(config)


class Engine:
    """A Renderer with one model loaded at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = resolved(config)
        self.gpu_name = device_name(config.device)
        self._loaded: tuple[ModelSource, VideoModel] | None = None
        self._prompts = PromptCache()
        torch.backends.cudnn.deterministic = True
        if self.config.device != "cpu":
            torch.cuda.set_device(self.config.device)  # or the first card would hold a context for nothing

    def render(self, batch: Batch) -> Rendering:
        """Raises OutOfDeviceMemory when the batch does not fit, ModelError when weights cannot be fetched."""
        try:
            return self._render(batch)
        except torch.OutOfMemoryError as error:
            reason = str(error).partition("\n")[0]
        # Past the handler, where nothing holds the failed batch's tensors any more: its halves need the room.
        torch.cuda.empty_cache()
        raise OutOfDeviceMemory(
            f"{self.config.device} has too little memory for {batch.size} clips of {batch.bucket.label}: "
            f"{reason}",
            hint="ask for a smaller size or fewer frames",
        )

    @torch.inference_mode()
    def _render(self, batch: Batch) -> Rendering:
        clock = StageClock(self.config.device)
        with clock.stage("load_s"):
            model = self._model(batch.bucket)
        with clock.stage("encode_s"):
            prompts, negatives = self._encode(model, batch)
        with clock.stage("denoise_s"):
            latents_BCTHW = self._denoise(model, batch, prompts, negatives)
        with clock.stage("decode_s"):
            # One by one: neither memory nor result depends on the neighbours, and padding costs nothing.
            clips = tuple(
                finished_clip(model, job, latents_BCTHW[index : index + 1])
                for index, job in enumerate(batch.jobs)
            )
        return Rendering(clips=clips, times=clock.times(), peak_memory_bytes=clock.peak_memory_bytes())

    def _model(self, bucket: Bucket) -> VideoModel:
        source = self.config.models[bucket.model]
        assert source.revision == bucket.revision, (source, bucket)
        if self._loaded is None or self._loaded[0] != source:
            self._loaded = None  # the old weights must go before the new ones come
            torch.cuda.empty_cache()
            model = load_wan(
                source,
                device=self.config.device,
                dtype=self.config.dtype,
                vae_dtype=self.config.vae_dtype,
            )
            self._loaded = (source, model)
        return self._loaded[1]

    def _encode(self, model: VideoModel, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Prompts and negative prompts of every slot; no negatives where nothing is guided."""
        jobs = slots(batch)
        negatives = jobs if uses_guidance(batch.bucket.guidance_scale) else []
        texts = [job.prompt for job in jobs], [job.negative_prompt for job in negatives]
        prompts, negative_prompts = (self._prompts.encode(model, batch.bucket, column) for column in texts)
        return prompts, negative_prompts

    def _denoise(
        self,
        model: VideoModel,
        batch: Batch,
        prompts: Sequence[torch.Tensor],
        negatives: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        bucket = batch.bucket
        shape = model.latent_shape(width=bucket.width, height=bucket.height, num_frames=bucket.num_frames)
        noise_BCTHW = initial_noise((job.seed for job in slots(batch)), shape_CTHW=shape)
        stepper = Stepper(
            model.scheduler_config,
            flow_shift=bucket.flow_shift,
            steps=bucket.steps,
            device=self.config.device,
        )
        schedule = make_schedule(
            stepper.timesteps,
            boundary_timestep=model.boundary_timestep,
            guidance_scale=bucket.guidance_scale,
            guidance_scale_2=bucket.guidance_scale_2,
        )
        return denoise(model, noise_BCTHW.to(self.config.device), schedule, stepper, prompts, negatives)


def slots(batch: Batch) -> list[Job]:
    """The batch's jobs, padded to its size with copies of the first."""
    return [*batch.jobs, *[batch.jobs[0]] * (batch.size - len(batch.jobs))]


def denoise(
    model: VideoModel,
    latents_BCTHW: torch.Tensor,
    schedule: Sequence[Step],
    stepper: Stepper,
    prompts: Sequence[torch.Tensor],
    negatives: Sequence[torch.Tensor],
) -> torch.Tensor:
    """From noise to clean latents, in fp32, through the experts in turn."""
    for expert, steps in groupby(schedule, key=lambda step: step.expert):
        text = model.text_states(prompts, expert=expert)
        negative_text = model.text_states(negatives, expert=expert) if negatives else None
        for step in steps:
            velocity_BCTHW = model.velocity(
                latents_BCTHW, timestep=step.timestep, text_states=text, expert=expert
            )
            if step.guidance_scale != 1.0:
                unguided_BCTHW = model.velocity(
                    latents_BCTHW, timestep=step.timestep, text_states=negative_text, expert=expert
                )
                velocity_BCTHW = guided(velocity_BCTHW, unguided_BCTHW, scale=step.guidance_scale)
            latents_BCTHW = stepper.step(velocity_BCTHW, timestep=step.timestep, latents_BCTHW=latents_BCTHW)
    return latents_BCTHW


def finished_clip(model: VideoModel, job: Job, latents_1CTHW: torch.Tensor) -> RenderedClip:
    """Decode one clip to what its job asked for, or say that its numbers are not numbers."""
    rgb_3FHW = model.decode(latents_1CTHW)
    # The latents too, as the decoder clamps: an infinite one could come out as a plain white frame.
    num_wrong = sum(int((~values.isfinite()).sum()) for values in (latents_1CTHW, rgb_3FHW))
    if num_wrong:
        error = NonFiniteOutput(
            f"non-finite output: {num_wrong} values", hint="try another seed or a lower guidance_scale"
        )
        return RenderedClip(job_id=job.id, frames=None, error=error)
    frames = to_frames(rgb_3FHW, width=job.width, height=job.height, num_frames=job.num_frames)
    return RenderedClip(job_id=job.id, frames=frames)
