"""How often clips show what their captions say: the model as shipped, sampled as the engine does, and judged.

Shapes: B clips, C channels, T latent frames, H and W sides, F frames.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pipeline.config import EngineConfig, resolved
from pipeline.engine import denoise
from pipeline.frames import to_frames
from pipeline.models.lora_files import find_lora
from pipeline.models.resolve import ResolvedModel, resolve_model
from pipeline.models.tiny import lora, whole_clip
from pipeline.models.tiny.captions import CHOICE_SEED, EVALUATION_SEED, Case, evaluation_cases
from pipeline.models.tiny.described import ignore_interrupts
from pipeline.models.tiny.export import FEW_STEP_FOLDER
from pipeline.models.wan import WanModel, load_wan
from pipeline.quality import i420
from pipeline.quality.oracle import Reading, read_clip
from pipeline.sampling.guidance import uses_guidance
from pipeline.sampling.noise import initial_noise
from pipeline.sampling.schedules import make_schedule
from pipeline.sampling.steppers import Stepper

FEW_STEPS = 4
SCALES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
_FIRST_SEED, _FIRST_CHOICE_SEED = 500_000, 600_000
_REPORTED_EVERY = 100  # clips


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How clips are sampled. few_step: with the update that needs no guidance."""

    name: str
    steps: int
    guidance_scale: float
    few_step: bool = False


@dataclass(frozen=True, kw_only=True)
class Score:
    """Shares of clips that show the right thing, 0 to 1."""

    setting: Setting
    num_clips: int
    colour: float
    shape: float
    motion: float
    all_three: float


def evaluate(
    folder: Path,
    settings: Sequence[Setting],
    *,
    device: str,
    num_captions: int = 200,
    num_seeds: int = 3,
    to_choose: bool = False,
) -> list[Score]:
    """The scores of a checkpoint on held-out captions, one for each setting. 64x64, 17 frames.

    to_choose: a setting by them, so on other captions and other noise than are reported. Says on stderr how
    far it is.
    """
    caption_seed, first_seed = (
        (CHOICE_SEED, _FIRST_CHOICE_SEED) if to_choose else (EVALUATION_SEED, _FIRST_SEED)
    )
    cases = evaluation_cases(seed=caption_seed)[:num_captions] * num_seeds
    noise_seeds = range(first_seed, first_seed + len(cases))
    resolved_model = resolve_model(str(folder))
    scores = []
    with _Judges(len(cases)) as judges:
        for few_step in (False, True):
            wanted = [setting for setting in settings if setting.few_step == few_step]
            if wanted:
                model = _loaded(resolved_model, few_step, device)
                scores += [
                    _score(resolved_model, model, setting, cases, noise_seeds, judges, device)
                    for setting in wanted
                ]
    return scores


def default_settings(folder: Path) -> list[Setting]:
    """What the model card reports: the defaults, the same without guidance, and the few-step update."""
    spec = resolve_model(str(folder)).spec
    steps, scale = spec.default_steps, spec.default_guidance_scale
    settings = [
        Setting(name=f"{number} steps, guidance {each:g}", steps=number, guidance_scale=each)
        for number in (steps, FEW_STEPS)
        for each in dict.fromkeys((scale, 1.0))
    ]
    if (folder / FEW_STEP_FOLDER / lora.FILE_NAME).is_file():
        name = f"{FEW_STEPS} steps, guidance 1, few-step update"
        settings.append(Setting(name=name, steps=FEW_STEPS, guidance_scale=1.0, few_step=True))
    return settings


def table(scores: Sequence[Score]) -> str:
    """Markdown."""
    rows = ["| sampling | clips | colour | shape | motion | all three |", "|---|---|---|---|---|---|"]
    for score in scores:
        shares = (score.colour, score.shape, score.motion, score.all_three)
        cells = " | ".join(f"{share:.1%}" for share in shares)
        rows.append(f"| {score.setting.name} | {score.num_clips} | {cells} |")
    return "\n".join(rows)


def sample(
    model: WanModel,
    spec_size: tuple[int, int, int],
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    negative_prompt: str,
    steps: int,
    guidance_scale: float,
    flow_shift: float,
    device: str,
) -> Iterator[npt.NDArray[np.uint8]]:
    """The I420 frames of each prompt's clip with its seed. spec_size: width, height, frames.

    The engine's own steps in larger batches; decoding is one pass a batch, the same numbers up to rounding.
    """
    width, height, num_frames = spec_size
    sampled_at_once, decoded_at_once = _at_once(device)
    with torch.inference_mode():
        distinct = list(dict.fromkeys([*prompts, negative_prompt]))
        texts = dict(zip(distinct, model.encode(distinct), strict=True))
        for start in range(0, len(prompts), sampled_at_once):
            part = slice(start, start + sampled_at_once)
            encoded = [texts[prompt] for prompt in prompts[part]]
            negatives = [texts[negative_prompt]] * len(encoded) if uses_guidance(guidance_scale) else []
            shape = model.latent_shape(width=width, height=height, num_frames=num_frames)
            noise = initial_noise(seeds[part], shape_CTHW=shape).to(device)
            stepper = Stepper(model.scheduler_config, flow_shift=flow_shift, steps=steps, device=device)
            schedule = make_schedule(
                stepper.timesteps,
                boundary_timestep=None,
                guidance_scale=guidance_scale,
                guidance_scale_2=None,
            )
            latents = denoise(model, noise, schedule, stepper, encoded, negatives)
            for rgb_3FHW in _decoded(model, latents, decoded_at_once):
                yield to_frames(rgb_3FHW, width=width, height=height, num_frames=num_frames)


def _at_once(device: str) -> tuple[int, int]:
    """How many clips to sample and to decode together: on a CPU as many as its caches hold.

    On two cores decoding takes 0.08 s a clip alone and 0.19 s among 25.
    """
    return (20, 1) if device == "cpu" else (200, 25)


def _decoded(model: WanModel, latents_BCTHW: torch.Tensor, at_once: int) -> Iterator[torch.Tensor]:
    """Each clip's fp32 RGB in [0, 1], (3, F, H, W)."""
    weights = dict(model.vae.named_parameters())
    mean, std = (
        torch.tensor(values, device=latents_BCTHW.device)
        for values in (model.vae.config.latents_mean, model.vae.config.latents_std)
    )
    for latents in latents_BCTHW.split(at_once):
        video_BTHW3 = whole_clip.decode(weights, latents.permute(0, 2, 3, 4, 1).float() * std + mean)
        yield from (video_BTHW3 / 2 + 0.5).clamp(0, 1).permute(0, 4, 1, 2, 3)


def _score(
    resolved_model: ResolvedModel,
    model: WanModel,
    setting: Setting,
    cases: Sequence[Case],
    noise_seeds: Sequence[int],
    judges: _Judges,
    device: str,
) -> Score:
    spec = resolved_model.spec
    clips = sample(
        model,
        (spec.default_width, spec.default_height, spec.default_num_frames),
        [case.caption for case in cases],
        noise_seeds,
        negative_prompt=spec.default_negative_prompt,
        steps=setting.steps,
        guidance_scale=setting.guidance_scale,
        flow_shift=spec.default_flow_shift,
        device=device,
    )
    readings = judges.read(_reported(clips, setting.name, len(cases)))
    right = np.array(
        [
            (reading.colour == case.colour, reading.shape == case.shape, reading.motion == case.motion)
            for case, reading in zip(cases, readings, strict=True)
        ]
    )
    colour, shape, motion = right.mean(0).tolist()
    return Score(
        setting=setting,
        num_clips=len(cases),
        colour=colour,
        shape=shape,
        motion=motion,
        all_three=float(right.all(1).mean()),
    )


def _reported(
    clips: Iterable[npt.NDArray[np.uint8]], name: str, num_clips: int
) -> Iterator[npt.NDArray[np.uint8]]:
    """The clips, with a line on stderr now and then."""
    began_s = time.monotonic()
    for done, clip in enumerate(clips, start=1):
        yield clip
        if done % _REPORTED_EVERY == 0 or done == num_clips:
            used_s = time.monotonic() - began_s
            print(f"{name}: {done} of {num_clips} clips, {used_s:.0f} s", file=sys.stderr, flush=True)


def _loaded(resolved_model: ResolvedModel, few_step: bool, device: str) -> WanModel:
    source = resolved_model.source
    if few_step:
        source = replace(source, loras=(find_lora(str(source.folder / FEW_STEP_FOLDER)).source,))
    config = resolved(EngineConfig(device=device, models={source.weights: source}))
    return load_wan(source, device=device, dtype=config.dtype, vae_dtype="float32")


class _Judges:
    """Processes that read clips while the next ones are sampled, where there are enough to be worth it."""

    def __init__(self, num_clips: int) -> None:
        num_processes = min(12, max(1, (os.cpu_count() or 1) - 1))
        # Spawned: a fork of a process that has used the card cannot be trusted.
        spawn = multiprocessing.get_context("spawn")
        self._pool = (
            ProcessPoolExecutor(num_processes, spawn, initializer=ignore_interrupts)
            if num_clips >= 50
            else None
        )

    def __enter__(self) -> _Judges:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def read(self, clips: Iterable[npt.NDArray[np.uint8]]) -> list[Reading]:
        """What each clip shows, of its I420 frames."""
        videos = (i420.to_rgb(clip) for clip in clips)
        if self._pool is None:
            return [read_clip(video) for video in videos]
        return list(self._pool.map(read_clip, videos, chunksize=10))  # takes them as they come
