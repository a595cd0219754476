"""How long one denoising step of a full batch takes, measured on the model itself.

Shapes: B clips, C latent channels, T latent frames, H and W latent sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from fractions import Fraction

import torch

from manifests.job import Batch, Bucket, Job
from pipeline.models.protocol import VideoModel
from pipeline.rendering import StepTimes
from pipeline.timing import StageClock

# Two calls compile and tune, the third records what is bound by launches.
WARM_UP_STEPS = 3
# At least; short steps fill a second, or their median would be within the noise of the clocks.
TIMED_STEPS = 3
TIMED_S = 1.0

# Of usual length: the padding of a short prompt costs less.
PROMPT = (
    "A wide, steady shot of a harbour at dawn. Fishing boats with peeling blue and red paint rock gently "
    "at their moorings while gulls circle above the masts. In the foreground a fisherman in a yellow "
    "raincoat coils a rope on the wet planks of the pier, breath visible in the cold air. Warm light breaks "
    "through low clouds and glitters on the ripples; the camera moves slowly forward, shallow depth of field."
)
NEGATIVE_PROMPT = "blurry, overexposed, static, low quality, watermark, subtitles, deformed hands, a crowd"


def sample_batch(bucket: Bucket, *, size: int) -> Batch:
    """One job of a bucket, the other slots padding: as much work a step as `size` jobs."""
    job = Job(
        id="probe",
        fingerprint="",
        prompt=PROMPT,
        negative_prompt=NEGATIVE_PROMPT,
        width=bucket.width,
        height=bucket.height,
        num_frames=bucket.num_frames,
        fps=Fraction(1),
        seed=0,
        steps=bucket.steps,
        guidance_scale=bucket.guidance_scale,
        guidance_scale_2=bucket.guidance_scale_2,
        flow_shift=bucket.flow_shift,
        preset=bucket.preset,
        model=bucket.model,
        crf=18,
        encoder_preset="medium",
    )
    return Batch(number=0, bucket=bucket, jobs=(job,), size=size, cap=size)


def time_steps(
    model: VideoModel,
    bucket: Bucket,
    prompts: Sequence[torch.Tensor],
    negatives: Sequence[torch.Tensor],
    *,
    device: str,
) -> StepTimes:
    """The median step of one batch, by the first expert: a second one does the same work.

    prompts, negatives: encoded, one for each slot; no negatives where nothing is guided.
    """
    shape_CTHW = model.latent_shape(width=bucket.width, height=bucket.height, num_frames=bucket.num_frames)
    latents_BCTHW = torch.randn(len(prompts), *shape_CTHW, device=device)
    guidance_scale = bucket.guidance_scale if negatives else 1.0
    clock = StageClock(device)
    denoiser = model.denoiser(prompts, negatives, timesteps=torch.full((1,), 500.0, device=device), expert=0)

    def step() -> float:
        with clock.stage("denoise_s"):
            denoiser(latents_BCTHW, index=0, guidance_scale=guidance_scale)
        return clock.times().denoise_s

    for _ in range(WARM_UP_STEPS):
        step()
    step_s: list[float] = []
    while len(step_s) < TIMED_STEPS or sum(step_s) < TIMED_S:
        step_s.append(step())
    return StepTimes(step_s=statistics.median(step_s), peak_memory_bytes=clock.peak_memory_bytes())
