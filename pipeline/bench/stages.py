"""The stages of a bench: one by name, and those that time a part of a clip."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import diffusers.utils.logging
import torch
import transformers.utils.logging

from manifests.errors import OutOfDeviceMemory
from pipeline.approx.fp8 import fp8_support
from pipeline.approx.fp8_decoder import why_plain
from pipeline.approx.sparse_attention import BlockSparseAttention
from pipeline.bench import ours, reference
from pipeline.bench.approximate import fast_stage, turbo_stage
from pipeline.bench.clips import Mp4, clip_stage, small_stage, steady_stage
from pipeline.bench.clock import Clock, free_memory
from pipeline.bench.matmul import make_matmul
from pipeline.bench.operations import decode_operations, guided_operations
from pipeline.bench.results import (
    DIFFUSERS,
    OURS,
    OURS_BY_FRAME,
    OURS_FP8,
    OURS_SPARSE,
    TUNED,
    StageResult,
)
from pipeline.bench.setting import NEGATIVE_TOKENS, PROMPT_TOKENS, Setting, guided_inputs, noise
from pipeline.bench.turns import Lineup


def run_stage(stage: str, setting: Setting, *, mp4: Mp4 | None = None) -> StageResult:
    """stage: one of STAGES. mp4: for a stage that writes files. Raises OutOfDeviceMemory.

    What a stage allocates is free when it returns.
    """
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
    torch.compiler.reset()  # what was compiled for another stage's sizes would be compiled for any size now
    try:
        return _stages(mp4)[stage](setting)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
    finally:
        free_memory(setting.device)
    raise OutOfDeviceMemory(
        f"{setting.device} has too little memory for stage `{stage}` of {setting.shape.name} at "
        f"{setting.label}: {reason}",
        hint="ask for a smaller `--size` or fewer `--frames`, and end what else runs on the device",
    )


def _stages(mp4: Mp4 | None) -> Mapping[str, Callable[[Setting], StageResult]]:
    def writing(stage: Callable[[Setting, Mp4], StageResult]) -> Callable[[Setting], StageResult]:
        def run(setting: Setting) -> StageResult:
            assert mp4 is not None
            return stage(setting, mp4)

        return run

    return {
        "forward": forward_stage,
        "decode": decode_stage,
        "clip": writing(clip_stage),
        "small": small_stage,
        "steady": steady_stage,
        "turbo": writing(turbo_stage),
        "fast": writing(fast_stage),
    }


def forward_stage(setting: Setting) -> StageResult:
    """A guided step; of the first expert where there are two."""
    clock = Clock(setting.device)
    before_bytes = clock.allocated_bytes()
    module = setting.weights.transformer(0, device=setting.device, dtype=setting.dtype)
    inputs = guided_inputs(setting)
    expand = setting.shape.expand_timesteps
    attention, tried = reference.fastest_attention(setting, clock)

    lineup = Lineup(clock, shared_bytes=clock.allocated_bytes() - before_bytes)
    lineup.add(
        DIFFUSERS,
        lambda: reference.guided_step(module, inputs, expand_timesteps=expand),
        units=2,
        facts={"attention": reference.DEFAULT_ATTENTION},
    )
    setting.say(f"compiling diffusers' blocks, attention {attention}")
    lineup.add(
        TUNED,
        lambda: reference.guided_step(
            reference.tuned(module, attention=attention), inputs, expand_timesteps=expand
        ),
        units=2,
        facts={"attention": attention, "attention_tried": tried},
    )
    setting.say("warming up our forward")
    lineup.add(
        OURS,
        lambda: ours.guided_step(setting, module, inputs),
        units=2,
        facts={"attention": ours.attention(setting)},
    )
    setting.say("warming up our forward in 8 bits")

    def in_8_bits(sparse: BlockSparseAttention | None = None) -> Callable[[], torch.Tensor]:
        own = setting.weights.transformer(0, device=setting.device, dtype=setting.dtype)
        return ours.guided_step(setting, own, inputs, fp8=True, sparse=sparse)

    lineup.add(OURS_FP8, in_8_bits, units=2, shares=False)
    sparse = BlockSparseAttention()
    if setting.num_tokens >= sparse.least_tokens:
        setting.say("warming up our forward with sparse attention")
        facts = {"density": sparse.density}
        lineup.add(OURS_SPARSE, lambda: in_8_bits(sparse), units=2, facts=facts, shares=False)

    operations = guided_operations(
        setting.shape.transformer,
        latent_shape_CTHW=setting.latent_shape_CTHW,
        text_keys=1 + (PROMPT_TOKENS + NEGATIVE_TOKENS) / 2,  # their padding is one key
    )
    result = StageResult(
        stage="forward",
        timed=f"half of a guided step, {setting.label}",
        operations=operations.total,
        notes=(
            "in the timer: both forwards with embedders and head, and their combination",
            "not in it: the sampler, and on our side text keys and timestep tables, made once a clip",
            f"prompts of {PROMPT_TOKENS} and {NEGATIVE_TOKENS} tokens; memory of transformer and inputs",
            f"ours fp8: {fp8_support(setting.device, dtype=setting.dtype)}",
            f"ours sparse: a late step in fp8, {sparse.density:.0%} of the pairs of tokens, from "
            f"{sparse.least_tokens:,} tokens on;",
            "what that changes is not to be seen with random weights",
            "TFLOP/s: in every column only the work that a dense guided step needs, none of it twice",
        ),
        facts={"operations": asdict(operations)},
    )
    return _in_turns(setting, lineup, result)


def decode_stage(setting: Setting) -> StageResult:
    """Latents to RGB."""
    latents_1CTHW = noise(setting)
    our_dtype = ours.vae_dtype(setting)

    def vae(dtype: torch.dtype) -> Any:
        return setting.weights.vae(device=setting.device).to(dtype)

    setting.say("warming up the decoders")
    lineup = Lineup(Clock(setting.device))
    lineup.add(DIFFUSERS, lambda: reference.decode(vae(torch.float32), latents_1CTHW))
    lineup.add(TUNED, lambda: reference.decode(vae(setting.dtype), latents_1CTHW))
    lineup.add(
        OURS, lambda: ours.Decoding(setting, vae(our_dtype), latents_1CTHW), output_of=ours.Decoding.video
    )
    lineup.add(
        OURS_BY_FRAME,
        lambda: ours.Decoding(setting, vae(our_dtype), latents_1CTHW, frames_at_once=1),
        output_of=ours.Decoding.video,
    )
    lineup.add(
        OURS_FP8,
        lambda: ours.Decoding(setting, vae(our_dtype), latents_1CTHW, fp8=True),
        output_of=ours.Decoding.video,
    )
    reason = why_plain(setting.device, dtype=our_dtype)
    tuned_name, our_name = (str(dtype).removeprefix("torch.") for dtype in (setting.dtype, our_dtype))
    result = StageResult(
        stage="decode",
        timed=f"latents to RGB, {setting.label}",
        operations=decode_operations(setting.shape.vae, latent_shape_CTHW=setting.latent_shape_CTHW),
        notes=(
            "in the timer: latents to RGB in [0, 1] on the device; memory of the VAE alone",
            f"diffusers in float32, tuned in {tuned_name}, ours in {our_name}",
            "ours: as many latent frames at once as the device has room for; by frame: one at a time",
            f"ours fp8: residual blocks are {f'not in 8 bits: {reason}' if reason else 'in 8 bits'}",
        ),
    )
    return _in_turns(setting, lineup, result)


def _in_turns(setting: Setting, lineup: Lineup, result: StageResult) -> StageResult:
    """The result with its columns, and with the rate of plain matrix products in the same turns."""
    matmul, operations = make_matmul(device=setting.device, dtype=setting.dtype)
    matmul()
    setting.say(f"timing {result.stage}: turns of {setting.seconds:g} s in all for each side")
    columns, beside = lineup.run(seconds=setting.seconds, beside={"matmul": matmul})
    return replace(result, columns=columns, matmul_operations=operations, matmul_samples_ms=beside["matmul"])
