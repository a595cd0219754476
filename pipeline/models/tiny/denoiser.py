"""Wan's transformer from its weights, for training: one timestep a clip, and padded text folded into one key.

A clip is its patches: (N, P) with P = 2 * 2 * Z numbers of a patch in the order of the transformer's output.
Inference pads every prompt with zeros to 512 tokens, which all cross-attention sees; here the padding is one
more key whose score gets the logarithm of how many it stands for.

Shapes: B clips, N tokens, P numbers of a patch, D channels, H heads of K channels, L text tokens and one for
the padding, E text channels, Z latent channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

from pipeline.kernels.affine_norm import affine_norm
from pipeline.kernels.gated_residual import gated_residual
from pipeline.kernels.qk_norm_rope import Rope, qk_norm, qk_norm_rope
from pipeline.models.text import MAX_TOKENS
from pipeline.models.tiny.flat import Weights
from pipeline.models.tiny.networks import HEAD_CHANNELS, PATCH

_EPS = 1e-6
_WAVES = 128

Block = Callable[..., torch.Tensor]


def patchify(latents_BTHWZ: torch.Tensor) -> torch.Tensor:
    """(B, N, P)."""
    cells = latents_BTHWZ.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))  # B, T, h, ph, w, pw, Z
    return cells.transpose(3, 4).flatten(4).flatten(1, 3)


def unpatchify(patches_BNP: torch.Tensor, *, frames: int, height: int, width: int) -> torch.Tensor:
    """(B, T, H, W, Z) of latents `height` by `width`."""
    grid = (frames, height // PATCH, width // PATCH)
    cells = patches_BNP.unflatten(1, grid).unflatten(-1, (PATCH, PATCH, -1))  # B, T, h, w, ph, pw, Z
    return cells.transpose(3, 4).flatten(4, 5).flatten(2, 3)


@cache
def rope_tables(frames: int, height: int, width: int, device: str) -> Rope:
    """Cosines and sines of a clip's tokens, (N, 1, K / 2) each. height, width: of the latents."""
    rope = WanRotaryPosEmbed(HEAD_CHANNELS, (1, PATCH, PATCH), 1024)
    cos_1N1K, sin_1N1K = rope(torch.empty(1, 1, frames, height, width))
    # diffusers keeps each angle twice, once for each channel of its pair.
    return cos_1N1K[0, ..., 0::2].float().to(device), sin_1N1K[0, ..., 1::2].float().to(device)


def velocity(
    weights: Weights,
    patches_BNP: torch.Tensor,
    timesteps_B: torch.Tensor,
    text_BLE: torch.Tensor,
    lengths_B: torch.Tensor,
    rope: Rope,
    block: Block | None = None,
) -> torch.Tensor:
    """fp32 (B, N, P). text_BLE: zero past each caption's end. block: a compiled `transformer_block`."""
    kernel = weights["patch_embedding.weight"].permute(0, 2, 3, 4, 1).flatten(1)
    x_BND = F.linear(patches_BNP.to(kernel.dtype), kernel, weights["patch_embedding.bias"])
    time_BD, modulation_B6D = _time(weights, timesteps_B)
    text_BLD, bias_BL = _text(weights, text_BLE.to(kernel.dtype), lengths_B)
    for block_weights in _blocks(weights):
        x_BND = (block or transformer_block)(block_weights, x_BND, modulation_B6D, text_BLD, bias_BL, *rope)
    shift, scale = (weights["scale_shift_table"] + time_BD[:, None]).float().chunk(2, dim=1)
    x_BND = affine_norm(x_BND, weight=1 + scale, bias=shift, eps=_EPS)
    return F.linear(x_BND, weights["proj_out.weight"], weights["proj_out.bias"]).float()


def transformer_block(
    weights: dict[str, torch.Tensor],
    x_BND: torch.Tensor,
    modulation_B6D: torch.Tensor,
    text_BLD: torch.Tensor,
    bias_BL: torch.Tensor,
    cos_N1R: torch.Tensor,
    sin_N1R: torch.Tensor,
) -> torch.Tensor:
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (
        weights["scale_shift_table"].float() + modulation_B6D.float()
    ).chunk(6, dim=1)
    normed = affine_norm(x_BND, weight=1 + scale, bias=shift, eps=_EPS)
    x_BND = gated_residual(x_BND, _self_attention(weights, normed, (cos_N1R, sin_N1R)), gate=gate)
    normed = affine_norm(
        x_BND, weight=weights["norm2.weight"].float(), bias=weights["norm2.bias"].float(), eps=_EPS
    )
    x_BND = x_BND + _cross_attention(weights, normed, text_BLD, bias_BL)
    normed = affine_norm(x_BND, weight=1 + ffn_scale, bias=ffn_shift, eps=_EPS)
    hidden = F.gelu(_linear(weights, "ffn.net.0.proj", normed), approximate="tanh")
    return gated_residual(x_BND, _linear(weights, "ffn.net.2", hidden), gate=ffn_gate)


def _self_attention(weights: Weights, x_BND: torch.Tensor, rope: Rope) -> torch.Tensor:
    num_heads = x_BND.shape[-1] // HEAD_CHANNELS
    queries, keys = (
        qk_norm_rope(
            _linear(weights, f"attn1.to_{part}", x_BND),
            weight=weights[f"attn1.norm_{part}.weight"],
            eps=_EPS,
            num_heads=num_heads,
            rope=rope,
        ).transpose(1, 2)
        for part in "qk"
    )
    values = _linear(weights, "attn1.to_v", x_BND).unflatten(-1, (num_heads, -1)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)
    return _linear(weights, "attn1.to_out.0", mixed)


def _cross_attention(
    weights: Weights, x_BND: torch.Tensor, text_BLD: torch.Tensor, bias_BL: torch.Tensor
) -> torch.Tensor:
    num_heads = x_BND.shape[-1] // HEAD_CHANNELS
    queries, keys = (
        qk_norm(
            _linear(weights, f"attn2.to_{part}", source),
            weight=weights[f"attn2.norm_{part}.weight"],
            eps=_EPS,
            num_heads=num_heads,
        ).transpose(1, 2)
        for part, source in (("q", x_BND), ("k", text_BLD))
    )
    values = _linear(weights, "attn2.to_v", text_BLD).unflatten(-1, (num_heads, -1)).transpose(1, 2)
    scores = (queries @ keys.transpose(-1, -2)).float() * HEAD_CHANNELS**-0.5 + bias_BL[:, None, None]
    mixed = (scores.softmax(-1).to(values.dtype) @ values).transpose(1, 2).flatten(2)
    return _linear(weights, "attn2.to_out.0", mixed)


def _time(weights: Weights, timesteps_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = torch.arange(_WAVES // 2, device=timesteps_B.device) / (_WAVES // 2)
    angles = timesteps_B.float()[:, None] * torch.exp(-math.log(10_000) * exponents)
    name = "condition_embedder"
    waves = torch.cat([angles.cos(), angles.sin()], -1).to(weights[f"{name}.time_proj.weight"].dtype)
    hidden = F.silu(_linear(weights, f"{name}.time_embedder.linear_1", waves))
    time_BD = _linear(weights, f"{name}.time_embedder.linear_2", hidden)
    return time_BD, _linear(weights, f"{name}.time_proj", F.silu(time_BD)).unflatten(1, (6, -1))


def _text(
    weights: Weights, text_BLE: torch.Tensor, lengths_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedded tokens with one of the padding at the end, and what is added to their scores."""
    padded = F.pad(text_BLE, (0, 0, 0, 1))
    name = "condition_embedder.text_embedder"
    hidden = F.gelu(_linear(weights, f"{name}.linear_1", padded), approximate="tanh")
    present = torch.arange(text_BLE.shape[1], device=text_BLE.device) < lengths_B[:, None]
    tokens = torch.where(present, 0.0, -torch.inf)
    padding = torch.log(MAX_TOKENS - lengths_B.float())[:, None]
    return _linear(weights, f"{name}.linear_2", hidden), torch.cat([tokens, padding], 1)


def _blocks(weights: Weights) -> list[dict[str, torch.Tensor]]:
    grouped: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in weights.items():
        if name.startswith("blocks."):
            _, number, rest = name.split(".", 2)
            grouped.setdefault(int(number), {})[rest] = tensor
    return [grouped[number] for number in sorted(grouped)]


def _linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def compiled_block(device: str) -> Any:
    """`transformer_block` compiled for every shape it meets, on a card; as it is on the CPU."""
    if device == "cpu":
        return transformer_block
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(transformer_block, dynamic=False)
