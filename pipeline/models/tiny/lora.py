"""Low-rank updates of the transformer's linear layers, in the files' format of diffusers.

Hu et al. 2021. Keys are `transformer.<module>.lora_A.weight` (rank, in) and `.lora_B.weight` (out, rank); the
scale is 1.
"""

from __future__ import annotations

import torch

from pipeline.models.tiny.flat import Weights

FILE_NAME = "pytorch_lora_weights.safetensors"
_PREFIX = "transformer."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


def initial_lora(weights: Weights, *, rank: int) -> dict[str, torch.Tensor]:
    """An update of nothing for every linear layer but the text's. weights: a transformer's, by module."""
    lora: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim != 2 or not name.endswith(".weight") or "text_embedder" in name:
            continue
        module = _PREFIX + name.removesuffix(".weight")
        lora[module + _DOWN] = torch.randn(rank, weight.shape[1]) * weight.shape[1] ** -0.5
        lora[module + _UP] = torch.zeros(weight.shape[0], rank)
    return lora


def merged(weights: Weights, lora: Weights) -> dict[str, torch.Tensor]:
    """The transformer's weights with the update; the update's gradients flow."""
    result = dict(weights)
    for key, down in lora.items():
        if key.endswith(_DOWN):
            name, update = _target(key), lora[key.removesuffix(_DOWN) + _UP] @ down
            result[name] = weights[name] + update.to(weights[name].dtype)
    return result


def _target(key: str) -> str:
    return key.removeprefix(_PREFIX).removesuffix(_DOWN) + ".weight"
