"""How much arithmetic a stage needs, from shapes alone; a multiplication with its addition is two operations.

Only matrix products, attention and convolutions; everything else is bound by memory, not by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan


@dataclass(frozen=True, kw_only=True)
class ForwardOperations:
    """Of one clip."""

    linear: int
    self_attention: int
    cross_attention: int

    @property
    def total(self) -> int:
        return self.linear + self.self_attention + self.cross_attention


def forward_operations(
    config: Mapping[str, Any],
    *,
    latent_shape_CTHW: tuple[int, int, int, int],
    text_keys: float,
    text_rows: int = 0,
    time_rows: int = 0,
) -> ForwardOperations:
    """Of one forward. config: of the transformer. text_keys: that each token attends to, a mean perhaps.

    text_rows, time_rows: of text and of timesteps that are projected anew in this forward; a clip needs to
    do so once, diffusers does it in each.
    """
    tokens, width = _tokens(config, latent_shape_CTHW), _width(config)
    layers, ffn = config["num_layers"], config["ffn_dim"]
    # Self-attention's q, k, v and output, cross-attention's q and output, up and down.
    block_weights = 6 * width**2 + 2 * width * ffn
    out_weights = prod(config["patch_size"]) * config["out_channels"] * width
    text_weights = config["text_dim"] * width + width**2 + layers * 2 * width**2
    time_weights = config["freq_dim"] * width + 7 * width**2
    products = tokens * (layers * block_weights + out_weights) + text_rows * text_weights
    return ForwardOperations(
        linear=_embedding(config, tokens) + 2 * (products + time_rows * time_weights),
        self_attention=4 * layers * tokens**2 * width,
        cross_attention=round(4 * layers * tokens * text_keys * width),
    )


def guided_operations(
    config: Mapping[str, Any], *, latent_shape_CTHW: tuple[int, int, int, int], text_keys: float
) -> ForwardOperations:
    """Of half a guided step, once all that a clip or a step has in common is done only once.

    Both branches start from the same latents: embedding them and the first block's self-attention are common.
    """
    forward = forward_operations(config, latent_shape_CTHW=latent_shape_CTHW, text_keys=text_keys)
    tokens, width = _tokens(config, latent_shape_CTHW), _width(config)
    common = _embedding(config, tokens) + 2 * tokens * 4 * width**2
    return ForwardOperations(
        linear=forward.linear - common // 2,
        self_attention=forward.self_attention - 2 * tokens**2 * width,
        cross_attention=forward.cross_attention,
    )


def _tokens(config: Mapping[str, Any], latent_shape_CTHW: tuple[int, int, int, int]) -> int:
    return prod(side // cell for side, cell in zip(latent_shape_CTHW[1:], config["patch_size"], strict=True))


def _width(config: Mapping[str, Any]) -> int:
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def _embedding(config: Mapping[str, Any], tokens: int) -> int:
    return int(2 * tokens * prod(config["patch_size"]) * config["in_channels"] * _width(config))


def decode_operations(config: Mapping[str, Any], *, latent_shape_CTHW: tuple[int, int, int, int]) -> int:
    """Of decoding one clip. config: of a diffusers AutoencoderKLWan."""
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(dict(config))
    return sum(_decoder_parts(vae, *latent_shape_CTHW[1:]))


def _decoder_parts(vae: Any, frames: int, height: int, width: int) -> Iterator[int]:
    decoder = vae.decoder
    yield _conv(vae.post_quant_conv, frames * height * width)
    yield _conv(decoder.conv_in, frames * height * width)
    for resnet in decoder.mid_block.resnets:
        yield _resnet(resnet, frames * height * width)
    for attention in decoder.mid_block.attentions:
        yield _conv(attention.to_qkv, frames * height * width)
        yield _conv(attention.proj, frames * height * width)
        yield 4 * frames * (height * width) ** 2 * attention.dim
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            yield _resnet(resnet, frames * height * width)
        for upsampler in _upsamplers(block):
            if upsampler.mode == "upsample3d":  # every frame but the first becomes two
                yield _conv(upsampler.time_conv, (frames - 1) * height * width)
                frames = 2 * frames - 1
            height, width = 2 * height, 2 * width
            yield _conv(upsampler.resample[1], frames * height * width)
    yield _conv(decoder.conv_out, frames * height * width)


def _upsamplers(block: Any) -> list[Any]:
    """Wan2.2's blocks have one or none, Wan2.1's a list or none."""
    if hasattr(block, "upsampler"):
        return [block.upsampler] if block.upsampler is not None else []
    return list(block.upsamplers or [])


def _resnet(resnet: Any, positions: int) -> int:
    convs = [resnet.conv1, resnet.conv2]
    if hasattr(resnet.conv_shortcut, "weight"):  # where channels change; else the identity
        convs.append(resnet.conv_shortcut)
    return sum(_conv(conv, positions) for conv in convs)


def _conv(conv: Any, positions: int) -> int:
    """positions: of the result, in all its frames."""
    return 2 * positions * int(conv.weight.numel())
