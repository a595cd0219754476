"""umT5's encoder from its weights, for training: fixed shapes, no masks that depend on the data's length.

Shapes: B captions, L tokens, E channels, H heads of K channels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from pipeline.models.tiny.flat import Weights

_BUCKETS, _FARTHEST, _EPS = 32, 128, 1e-6


def encode_text(weights: Weights, ids_BL: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """(B, L, E), zero past each caption's end, as Wan's transformer gets it. Names are transformers' own."""
    present_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device) < lengths_B[:, None]
    mask_B11L = torch.where(present_BL, 0.0, -torch.inf)[:, None, None]
    x_BLE = F.embedding(ids_BL, weights["shared.weight"])
    num_layers = sum(name.endswith("SelfAttention.q.weight") for name in weights)
    for layer in range(num_layers):
        prefix = f"encoder.block.{layer}.layer"
        x_BLE = x_BLE + _attention(weights, f"{prefix}.0", x_BLE, mask_B11L)
        x_BLE = x_BLE + _feed_forward(weights, f"{prefix}.1", x_BLE)
    x_BLE = _norm(x_BLE, weights["encoder.final_layer_norm.weight"])
    return x_BLE * present_BL[..., None]


def _attention(weights: Weights, name: str, x_BLE: torch.Tensor, mask_B11L: torch.Tensor) -> torch.Tensor:
    normed = _norm(x_BLE, weights[f"{name}.layer_norm.weight"])
    bias_LLH = F.embedding(
        relative_buckets(x_BLE.shape[1], str(x_BLE.device)),
        weights[f"{name}.SelfAttention.relative_attention_bias.weight"],
    )
    heads = bias_LLH.shape[-1]
    queries, keys, values = (
        F.linear(normed, weights[f"{name}.SelfAttention.{part}.weight"])
        .unflatten(-1, (heads, -1))
        .transpose(1, 2)
        for part in "qkv"
    )
    scores = (queries @ keys.transpose(-1, -2)).float() + bias_LLH.permute(2, 0, 1) + mask_B11L
    mixed = scores.softmax(-1).to(values.dtype) @ values
    return F.linear(mixed.transpose(1, 2).flatten(2), weights[f"{name}.SelfAttention.o.weight"])


def _feed_forward(weights: Weights, name: str, x_BLE: torch.Tensor) -> torch.Tensor:
    normed = _norm(x_BLE, weights[f"{name}.layer_norm.weight"])
    gate, value = (F.linear(normed, weights[f"{name}.DenseReluDense.wi_{part}.weight"]) for part in (0, 1))
    return F.linear(F.gelu(gate, approximate="tanh") * value, weights[f"{name}.DenseReluDense.wo.weight"])


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), _EPS).to(x.dtype)


def relative_buckets(num_tokens: int, device: str) -> torch.Tensor:
    """(L, L): T5's number of each distance from query to key: exact when near, by logarithm further off."""
    place = torch.arange(num_tokens, device=device)
    distance = place[None] - place[:, None]
    half = _BUCKETS // 2
    exact = half // 2
    far = (
        torch.log(distance.abs().clamp(min=1).float() / exact) / math.log(_FARTHEST / exact) * (half - exact)
    )
    far = (exact + far.long()).clamp(max=half - 1)
    near = distance.abs()
    return (distance > 0) * half + torch.where(near < exact, near, far)
