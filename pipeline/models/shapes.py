"""Published models without their weights: what `vgbatch bench` builds. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from manifests.errors import UsageError
from manifests.model_spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The configs of one checkpoint in the diffusers format, and the clip that it is measured at.

    text_encoder: a umT5 config; empty for a checkpoint, which brings its own. boundary_ratio: of two experts.
    expand_timesteps: the pipeline gives every token a timestep of its own. width, height: pixels.
    """

    name: str
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    text_encoder: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    boundary_ratio: float | None = None
    expand_timesteps: bool = False
    width: int
    height: int
    num_frames: int
    fps: Fraction
    steps: int
    guidance_scale: float
    guidance_scale_2: float | None = None

    @property
    def num_experts(self) -> int:
        return 1 if self.boundary_ratio is None else 2

    @property
    def spatial(self) -> int:
        """Pixels of one latent along a side."""
        return int(self.vae.get("scale_factor_spatial", 8))

    @property
    def temporal(self) -> int:
        """Frames of one latent frame, the first excepted."""
        return int(self.vae.get("scale_factor_temporal", 4))

    @property
    def patch_pixels(self) -> int:
        """Pixels of one token along a side."""
        return self.spatial * int(self.transformer["patch_size"][1])

    @property
    def flow_shift(self) -> float:
        return float(self.scheduler.get("flow_shift", self.scheduler.get("shift", 1.0)))

    def latent_shape(self, *, width: int, height: int, num_frames: int) -> tuple[int, int, int, int]:
        """(C, T, H, W) of a clip of that size in pixels and frames, which the model must allow."""
        latent_frames = (num_frames - 1) // self.temporal + 1
        return int(self.vae["z_dim"]), latent_frames, height // self.spatial, width // self.spatial


def shape_named(name: str) -> Shape:
    """A published shape, by its name in any case. Raises UsageError."""
    found = _BY_NAME.get(name.casefold())
    if found is None:
        raise UsageError(
            f"no such shape: {name}",
            hint=f"shapes: {', '.join(shape.name for shape in PUBLISHED)}; `--model` takes a checkpoint",
        )
    return found


def checkpoint_shape(folder: Path, spec: ModelSpec) -> Shape:
    """Of a checkpoint that was resolved, at its default size. spec: what was resolved of it."""
    index, transformer, vae, scheduler = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in (
            "model_index.json",
            "transformer/config.json",
            "vae/config.json",
            "scheduler/scheduler_config.json",
        )
    )
    return Shape(
        name=spec.name,
        transformer=transformer,
        vae=vae,
        text_encoder={},
        scheduler=scheduler,
        boundary_ratio=index["boundary_ratio"] if spec.two_experts else None,
        expand_timesteps=bool(index.get("expand_timesteps", False)),
        width=spec.default_width,
        height=spec.default_height,
        num_frames=spec.default_num_frames,
        fps=spec.default_fps,
        steps=spec.default_steps,
        guidance_scale=spec.default_guidance_scale,
        guidance_scale_2=spec.default_guidance_scale_2,
    )


def _wan_transformer(*, heads: int, layers: int, ffn: int, channels: int) -> dict[str, Any]:
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "in_channels": channels,
        "out_channels": channels,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": ffn,
        "num_layers": layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "rope_max_seq_len": 1024,
    }


def _unipc(flow_shift: float) -> dict[str, Any]:
    return {
        "_class_name": "UniPCMultistepScheduler",
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "num_train_timesteps": 1000,
        "solver_order": 2,
        "solver_type": "bh2",
        "flow_shift": flow_shift,
    }


_UMT5_XXL = {
    "vocab_size": 256_384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10_240,
    "num_layers": 24,
    "num_heads": 64,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "gated-gelu",
}

# Mean and standard deviation of each latent channel, by which the pipelines scale them.
# fmt: off
_LATENTS_21 = {
    "latents_mean": [
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
    ],
    "latents_std": [
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
        3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
    ],
}
_LATENTS_22 = {
    "latents_mean": [
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
        -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
        -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
        -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
        0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ],
    "latents_std": [
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
        0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
        0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
        0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
        0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
}
# fmt: on

_VAE_21 = _LATENTS_21 | {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
}

_VAE_22 = _LATENTS_22 | {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
}

PUBLISHED = (
    Shape(
        name="Wan2.2-TI2V-5B",
        transformer=_wan_transformer(heads=24, layers=30, ffn=14_336, channels=48),
        vae=_VAE_22,
        text_encoder=_UMT5_XXL,
        scheduler=_unipc(5.0),
        expand_timesteps=True,
        width=1344,
        height=768,
        num_frames=121,
        fps=Fraction(24),
        steps=50,
        guidance_scale=5.0,
    ),
    Shape(
        name="Wan2.1-T2V-1.3B",
        transformer=_wan_transformer(heads=12, layers=30, ffn=8960, channels=16),
        vae=_VAE_21,
        text_encoder=_UMT5_XXL,
        scheduler=_unipc(3.0),
        width=832,
        height=480,
        num_frames=81,
        fps=Fraction(16),
        steps=50,
        guidance_scale=5.0,
    ),
    Shape(
        name="Wan2.1-T2V-14B",
        transformer=_wan_transformer(heads=40, layers=40, ffn=13_824, channels=16),
        vae=_VAE_21,
        text_encoder=_UMT5_XXL,
        scheduler=_unipc(3.0),
        width=832,
        height=480,
        num_frames=81,
        fps=Fraction(16),
        steps=50,
        guidance_scale=5.0,
    ),
    Shape(
        name="Wan2.2-T2V-A14B",
        transformer=_wan_transformer(heads=40, layers=40, ffn=13_824, channels=16),
        vae=_VAE_21,
        text_encoder=_UMT5_XXL,
        scheduler=_unipc(3.0),
        boundary_ratio=0.875,
        width=832,
        height=480,
        num_frames=81,
        fps=Fraction(16),
        steps=40,
        guidance_scale=4.0,
        guidance_scale_2=3.0,
    ),
)

# Wan2.2-TI2V's structure at a size that a CPU runs in a blink. Not published, so not offered.
TINY = Shape(
    name="tiny",
    transformer=_wan_transformer(heads=2, layers=2, ffn=48, channels=4)
    | {"attention_head_dim": 12, "text_dim": 32, "freq_dim": 32, "rope_max_seq_len": 64},
    vae=_VAE_22
    | {"base_dim": 4, "decoder_base_dim": 4, "z_dim": 4, "num_res_blocks": 1}
    | {"latents_mean": [0.3, -0.2, 0.1, 0.0], "latents_std": [1.5, 0.8, 1.1, 2.0]},
    text_encoder=_UMT5_XXL
    | {"vocab_size": 1024, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    scheduler=_unipc(5.0),
    expand_timesteps=True,
    width=64,
    height=64,
    num_frames=5,
    fps=Fraction(8),
    steps=2,
    guidance_scale=5.0,
)

_BY_NAME = {shape.name.casefold(): shape for shape in (*PUBLISHED, TINY)}
