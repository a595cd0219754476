"""diffusers' own side: as its documentation shows it, and tuned as its users tune it.

Shapes: B clips, N tokens, H heads of K channels, C latent channels, T latent frames, L text tokens,
E channels of the text encoder; pictures have 3 colours and F frames.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import UniPCMultistepScheduler, WanPipeline
from diffusers.models import attention_dispatch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.video_processor import VideoProcessor

from pipeline.bench.clock import Clock
from pipeline.bench.setting import SEED, GuidedInputs, Setting
from pipeline.bench.switches import with_cudnn
from pipeline.bench.weights import Parts
from pipeline.models.text import MAX_TOKENS

DEFAULT_ATTENTION = "native"  # torch's own choice
# Of a card, in diffusers' names. The hub's kernels are left out: they are fetched at run time.
_ATTENTIONS = ("_flash_3", "_native_cudnn", "_native_flash", DEFAULT_ATTENTION)
_ATTENTIONS_ON_CPU = (DEFAULT_ATTENTION,)
_ATTENTION_CALLS = 5


def guided_step(module: Any, inputs: GuidedInputs, *, expand_timesteps: bool) -> Callable[[], torch.Tensor]:
    """Both forwards of a step and their combination, as WanPipeline makes them."""

    texts = [_zero_padded(text_LE) for text_LE in (inputs.prompt_LE, inputs.negative_LE)]

    @torch.no_grad()
    def step() -> torch.Tensor:
        latents_1CTHW = inputs.latents_1CTHW.to(module.dtype)
        timestep = _timesteps(inputs, module) if expand_timesteps else inputs.timestep.expand(1)
        conditional, unconditional = (
            module(
                hidden_states=latents_1CTHW,
                timestep=timestep,
                encoder_hidden_states=text_1LE,
                return_dict=False,
            )[0]
            for text_1LE in texts
        )
        return unconditional + inputs.guidance_scale * (conditional - unconditional)

    return step


def _zero_padded(text_LE: torch.Tensor) -> torch.Tensor:
    return F.pad(text_LE, (0, 0, 0, MAX_TOKENS - len(text_LE))).unsqueeze(0)


def _timesteps(inputs: GuidedInputs, module: Any) -> torch.Tensor:
    """One for each token, all equal: Wan2.2-TI2V's way of telling frames that are given."""
    mask = torch.ones_like(inputs.latents_1CTHW)
    _, patch_height, patch_width = module.config.patch_size
    return (mask[0][0][:, ::patch_height, ::patch_width] * inputs.timestep).flatten().unsqueeze(0)


def decode(vae: Any, latents_1CTHW: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Latents to RGB (3, F, H, W) in [0, 1] on the device, as WanPipeline makes it, in the VAE's dtype."""
    processor = VideoProcessor(vae_scale_factor=vae.config.scale_factor_spatial)

    @torch.no_grad()
    def call() -> torch.Tensor:
        latents = latents_1CTHW.to(vae.dtype)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(latents.device, latents.dtype)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        video = vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0]
        return processor.postprocess_video(video, output_type="pt")[0].transpose(0, 1)

    return with_cudnn(call, deterministic=False)


def tuned(module: Any, *, attention: str) -> Any:
    """A transformer with the same weights, its blocks compiled, on the given attention of diffusers.

    The weights are shared, so it takes no memory; the module itself stays as it was.
    """
    weights = [*module.parameters(), *module.buffers()]
    twin = copy.deepcopy(module, {id(weight): weight for weight in weights})
    twin.set_attention_backend(attention)
    # The choice also became the default of every module that was given none.
    module.set_attention_backend(DEFAULT_ATTENTION)
    twin.compile_repeated_blocks(fullgraph=True, backend=_compiler(module.device))
    return twin


def fastest_attention(setting: Setting, clock: Clock) -> tuple[str, dict[str, Any]]:
    """Of what this machine has, for self-attention at this size; and of each one tried its ms, or why not.

    Compiled, as the blocks that it is for.
    """
    _offer_flash_attention_3()
    config = setting.shape.transformer
    shape_BNHK = (1, setting.num_tokens, config["num_attention_heads"], config["attention_head_dim"])
    qkv = [torch.randn(shape_BNHK, device=setting.device, dtype=setting.dtype) for _ in range(3)]
    names = _ATTENTIONS_ON_CPU if setting.device == "cpu" else _ATTENTIONS
    tried = {name: _attention_ms(name, qkv, clock) for name in names}
    setting.say("attention for diffusers: " + "; ".join(f"{name} {_found(ms)}" for name, ms in tried.items()))
    times = {name: ms for name, ms in tried.items() if isinstance(ms, float)}
    return min(times, key=lambda name: times[name]), tried


def _found(ms: float | str) -> str:
    return f"{ms:.2f} ms" if isinstance(ms, float) else f"no ({ms})"


def _attention_ms(name: str, qkv: Sequence[torch.Tensor], clock: Clock) -> float | str:
    backend = attention_dispatch.AttentionBackendName(name)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attention_dispatch.dispatch_attention_fn(query, key, value, backend=backend)

    compiled = torch.compile(attend, fullgraph=True, backend=_compiler(qkv[0].device))
    try:
        attention_dispatch._check_attention_backend_requirements(backend)
        clock.turn(lambda: compiled(*qkv), count=2)
        return min(clock.turn(lambda: compiled(*qkv), count=_ATTENTION_CALLS))
    except Exception as error:  # each backend has its own way of saying that it cannot
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def _compiler(device: torch.device) -> str:
    # The CPU has no need of generated code, and perhaps no compiler for it.
    return "aot_eager" if device.type == "cpu" else "inductor"


def _offer_flash_attention_3() -> None:
    """Let diffusers use the forward-only wheel of FlashAttention-3 where it is installed.

    diffusers looks for a build of the whole package under another name, or fetches the same kernel from a
    hub: the tuned column must not lack what ours may use.
    """
    if attention_dispatch._CAN_USE_FLASH_ATTN_3:
        return
    try:
        forward = importlib.import_module("fa3_fwd_interface").flash_attn_func
    except (ImportError, OSError):
        return
    known = inspect.signature(forward).parameters

    def flash_attention_3(**arguments: Any) -> Any:
        return forward(**{name: value for name, value in arguments.items() if name in known})

    attention_dispatch.flash_attn_3_func = flash_attention_3
    attention_dispatch._CAN_USE_FLASH_ATTN_3 = True


def plain_pipeline(setting: Setting, parts: Parts) -> WanPipeline:
    """As the documentation loads it: the VAE in float32."""
    return _pipeline(setting, parts, vae=setting.weights.vae(device=setting.device))


def tuned_pipeline(setting: Setting, parts: Parts, *, attention: str) -> WanPipeline:
    """The same weights, each transformer `tuned`, the VAE in the transformers' dtype."""
    twins = [tuned(expert, attention=attention) for expert in parts.experts]
    vae = setting.weights.vae(device=setting.device).to(setting.dtype)
    return _pipeline(setting, replace(parts, experts=twins), vae=vae)


def embedded_prompts(setting: Setting, parts: Parts, **prompts: str) -> dict[str, torch.Tensor]:
    """For a pipeline without a text encoder."""
    with torch.no_grad():
        embedded, negative = _pipeline(setting, parts).encode_prompt(
            **prompts, max_sequence_length=MAX_TOKENS, device=torch.device(setting.device)
        )
    return {"prompt_embeds": embedded, "negative_prompt_embeds": negative}


def _pipeline(setting: Setting, parts: Parts, *, vae: Any = None) -> WanPipeline:
    shape = setting.shape
    pipeline = WanPipeline(
        tokenizer=parts.tokenizer,
        text_encoder=parts.text_encoder,
        vae=vae,
        scheduler=_scheduler(shape.scheduler),
        transformer=parts.experts[0],
        transformer_2=parts.experts[1] if len(parts.experts) > 1 else None,
        boundary_ratio=shape.boundary_ratio,
        expand_timesteps=shape.expand_timesteps,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _scheduler(config: Any) -> Any:
    if config["_class_name"] == "UniPCMultistepScheduler":
        return UniPCMultistepScheduler.from_config(dict(config))
    return FlowMatchEulerDiscreteScheduler.from_config(dict(config))


def clip(pipeline: WanPipeline, setting: Setting, **prompts: Any) -> Callable[[], None]:
    """One whole clip as the documentation makes it, its frames on the host. prompts: texts, or embedded."""
    shape = setting.shape

    def call() -> None:
        pipeline(
            **prompts,
            width=setting.width,
            height=setting.height,
            num_frames=setting.num_frames,
            num_inference_steps=setting.steps,
            guidance_scale=shape.guidance_scale,
            guidance_scale_2=shape.guidance_scale_2,
            generator=torch.Generator("cpu").manual_seed(SEED),
            output_type="np",
        )

    return with_cudnn(call, deterministic=False)
