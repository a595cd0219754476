"""The built-in model's networks, untrained, and its tokenizer: real diffusers and transformers modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from tokenizers import normalizers
from transformers import UMT5Config, UMT5EncoderModel

from pipeline.models.tiny.captions import vocabulary
from pipeline.models.tiny.tokenizer import COMMON_WORDS, build_tokenizer

PATCH = 2
_GAIN, _BRANCH_GAIN = 1.4, 0.5  # of convolutions, and of those that a residual branch ends with
HEAD_CHANNELS = 64


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Channels and layers. REAL ships: 2.5 M, 4.2 M and 0.4 M parameters; TOY is for tests."""

    vae_base: int
    latent_channels: int
    heads: int
    layers: int
    ffn: int
    text_channels: int
    text_layers: int
    lora_rank: int


REAL = Sizes(
    vae_base=16,
    latent_channels=8,
    heads=3,
    layers=7,
    ffn=640,
    text_channels=128,
    text_layers=2,
    lora_rank=16,
)
TOY = Sizes(
    vae_base=4, latent_channels=4, heads=1, layers=2, ffn=64, text_channels=32, text_layers=1, lora_rank=2
)


def make_tokenizer() -> Any:
    """Reads every prompt in any case; each word of the captions is one token."""
    tokenizer = build_tokenizer([*vocabulary(), *COMMON_WORDS.split()])
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def make_vae(sizes: Sizes, **statistics: list[float]) -> Any:
    """statistics: latents_mean and latents_std, 0 and 1 until they are measured."""
    default = {
        "latents_mean": [0.0] * sizes.latent_channels,
        "latents_std": [1.0] * sizes.latent_channels,
    }
    vae = AutoencoderKLWan(
        base_dim=sizes.vae_base,
        z_dim=sizes.latent_channels,
        num_res_blocks=1,
        **(default | statistics),
    ).eval()
    _carry_signal(vae)
    return vae


@torch.no_grad()
def _carry_signal(vae: Any) -> None:
    """Begin with weights that keep the input's variance, and no biases.

    With torch's own, a third of it in every convolution, 1 % of what the decoder puts out depends on the
    picture, and 150 steps teach it nothing: 9.9 dB. With these 70 % does.
    """
    for name, parameter in vae.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim >= 4 and name.endswith("weight"):
            ends_branch = "conv2" in name or "proj" in name
            gain = _BRANCH_GAIN if ends_branch else _GAIN
            parameter.normal_(std=gain * parameter[0].numel() ** -0.5)


def make_transformer(sizes: Sizes) -> Any:
    """Its output starts at zero, the mean of what it is to learn, its modulation the same at all times."""
    module = WanTransformer3DModel(
        patch_size=(1, PATCH, PATCH),
        num_attention_heads=sizes.heads,
        attention_head_dim=HEAD_CHANNELS,
        in_channels=sizes.latent_channels,
        out_channels=sizes.latent_channels,
        text_dim=sizes.text_channels,
        freq_dim=128,
        ffn_dim=sizes.ffn,
        num_layers=sizes.layers,
    ).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias") or name.startswith(("proj_out", "condition_embedder.time_proj")):
                parameter.zero_()
            elif parameter.ndim >= 2 and name.endswith("weight"):
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    return module


def make_text_encoder(sizes: Sizes, *, num_tokens: int) -> Any:
    config = UMT5Config(
        vocab_size=num_tokens,
        d_model=sizes.text_channels,
        d_kv=32,
        num_heads=sizes.text_channels // 32,
        d_ff=2 * sizes.text_channels,
        num_layers=sizes.text_layers,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    return UMT5EncoderModel(config).eval()


def make_scheduler() -> Any:
    """The sampler that ships."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )


def scheduler_config() -> dict[str, Any]:
    """Of the sampler that ships, with its class, as in a checkpoint's scheduler_config.json."""
    return {"_class_name": "UniPCMultistepScheduler", **make_scheduler().config}
