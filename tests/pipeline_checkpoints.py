"""Tiny random checkpoints of the three Wan kinds, and the calls the pipeline's tests make on them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from manifests.job import Batch, Bucket, Job
from pipeline.config import EngineConfig
from pipeline.engine import Engine
from pipeline.models.resolve import ResolvedModel
from pipeline.models.tiny.tokenizer import build_tokenizer

WORDS = ["the", "cat", "walks", "over", "red", "roof", "under", "blue", "sky", "slowly"]
SHORT = "the red cat"
LONG = " ".join(WORDS * 6)
TEXT_CHANNELS = 32


def build_checkpoint(folder: Path, kind: str) -> Path:
    """kind: t2v (Wan2.1), ti2v (Wan2.2 5B) or a14b (Wan2.2 with two experts)."""
    torch.manual_seed(7)
    tokenizer = build_tokenizer(WORDS)
    vae = _residual_vae() if kind == "ti2v" else _plain_vae()
    experts = [_transformer(vae.config.z_dim) for _ in range(2 if kind == "a14b" else 1)]
    with torch.no_grad():
        _spread_colours(vae)
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=_text_encoder(len(tokenizer)),
        vae=vae,
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=experts[0],
        transformer_2=experts[1] if kind == "a14b" else None,
        boundary_ratio=0.875 if kind == "a14b" else None,
        expand_timesteps=kind == "ti2v",
    )
    pipeline.save_pretrained(folder)
    return folder


def _text_encoder(num_tokens: int) -> Any:
    """A umT5 encoder of two layers, whose output differs clearly from token to token."""
    config = UMT5Config(
        vocab_size=num_tokens,
        d_model=TEXT_CHANNELS,
        d_kv=16,
        num_heads=TEXT_CHANNELS // 16,
        d_ff=2 * TEXT_CHANNELS,
        num_layers=2,
        feed_forward_proj="gated-gelu",
    )
    return UMT5EncoderModel(config).eval()


def _transformer(channels: int) -> Any:
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=channels,
        text_dim=TEXT_CHANNELS,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=64,
    )
    with torch.no_grad():
        _heed_text(transformer)
        for parameter in transformer.parameters():  # no weight of one and no bias of zero may hide a mistake
            parameter.add_(0.05 * torch.randn_like(parameter))
    return transformer


def _heed_text(transformer: Any) -> None:
    """Make the text count: by chance, a prompt's few tokens drown among 500 rows of padding."""
    embedder = transformer.condition_embedder.text_embedder
    silent = [embedder.linear_1, embedder.linear_2]
    for block in transformer.blocks:
        cross = block.attn2
        silent += [cross.to_k, cross.to_v]  # with no bias anywhere, padding has no key and no value
        cross.norm_q.weight.mul_(3)
        cross.norm_k.weight.mul_(3)
        cross.to_out[0].weight.mul_(6)
    for linear in silent:
        linear.bias.zero_()


def _plain_vae() -> Any:
    return AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        num_res_blocks=1,
        latents_mean=[0.3, -0.2, 0.1, 0.0],
        latents_std=[1.5, 0.8, 1.1, 2.0],
    )


def _residual_vae() -> Any:
    return AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=6,
        z_dim=6,
        num_res_blocks=1,
        latents_mean=[0.3, -0.2, 0.1, 0.0, 0.2, -0.1],
        latents_std=[1.5, 0.8, 1.1, 2.0, 0.7, 1.2],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )


def _spread_colours(vae: Any) -> None:
    """Scale the decoder's last layer so that noise decodes to the middle of the range, well spread."""
    output = vae.decoder.conv_out
    output.weight.mul_(0.05)  # far from where the decoder clamps, so that the spread can be measured
    video = vae.decode(torch.randn(1, vae.config.z_dim, 3, 8, 8)).sample
    rows_per_colour = output.out_channels // 3  # the pixels of a patch, where the VAE has them
    spread, middle = (
        statistic.repeat_interleave(rows_per_colour) for statistic in torch.std_mean(video, dim=(0, 2, 3, 4))
    )
    output.weight.mul_((0.4 / spread).view(-1, 1, 1, 1, 1))
    output.bias.sub_(middle).mul_(0.4 / spread)


def make_engine(model: ResolvedModel) -> Engine:
    return Engine(EngineConfig(device="cpu", models={model.source.weights: model.source}))


def make_job(model: ResolvedModel, **settings: Any) -> Job:
    """A clip of 64x64, 9 frames, 4 steps, guidance 5 unless told otherwise."""
    job = Job(
        id="clip",
        fingerprint="0" * 64,
        prompt=SHORT,
        negative_prompt="blue",
        width=64,
        height=64,
        num_frames=9,
        fps=Fraction(8),
        seed=1,
        steps=4,
        guidance_scale=5.0,
        guidance_scale_2=3.0 if model.spec.two_experts else None,
        flow_shift=3.0,
        preset="exact",
        model=model.source.weights.model,
        lora=model.source.weights.lora,
        crf=18,
        encoder_preset="medium",
    )
    return replace(job, **settings)


def make_batch(model: ResolvedModel, *jobs: Job, size: int | None = None) -> Batch:
    """All jobs must share the first one's settings, as the planner sees to."""
    job, spec = jobs[0], model.spec
    bucket = Bucket(
        model=job.model,
        revision=spec.revision,
        preset=job.preset,
        width=-(-job.width // spec.multiple) * spec.multiple,
        height=-(-job.height // spec.multiple) * spec.multiple,
        num_frames=-(-(job.num_frames - 1) // spec.temporal) * spec.temporal + 1,
        steps=job.steps,
        guidance_scale=job.guidance_scale,
        guidance_scale_2=job.guidance_scale_2,
        flow_shift=job.flow_shift,
        lora=job.lora,
    )
    return Batch(number=0, bucket=bucket, jobs=jobs, size=size or len(jobs), cap=size or len(jobs))


def reference_video(pipeline: WanPipeline, job: Job, *, width: int, height: int, num_frames: int) -> Any:
    """What diffusers renders of a job alone, as its documentation calls it: RGB (3, F, H, W) in [0, 1]."""
    pipeline.scheduler = UniPCMultistepScheduler.from_config(
        pipeline.scheduler.config, flow_shift=job.flow_shift
    )
    video = pipeline(
        prompt=job.prompt,
        negative_prompt=job.negative_prompt,
        width=width,
        height=height,
        num_frames=num_frames,
        num_inference_steps=job.steps,
        guidance_scale=job.guidance_scale,
        guidance_scale_2=job.guidance_scale_2,
        generator=torch.Generator("cpu").manual_seed(job.seed),
        output_type="pt",
    ).frames[0]
    return video.transpose(0, 1)
