"""Low-rank updates (Hu et al. 2021) added to the weights of loaded transformers.

Files may be in any format that diffusers reads for Wan. An update is strength * alpha / rank * B A, summed in
fp32 and rounded once for all updates of a weight. Taking it off again would leave rounding behind, so weights
are restored from copies of what they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline
from safetensors import safe_open
from safetensors.torch import load_file

from manifests.errors import ModelError
from pipeline.config import LoraSource
from pipeline.models.hub import fetch_files

_DOWN, _UP, _UP_BIAS, _ALPHA = ".lora_A.weight", ".lora_B.weight", ".lora_B.bias", ".alpha"
_PREFIXES = ("transformer.", "transformer_2.")


class FusedLoras:
    """The LoRAs in the weights of a model's experts, diffusers modules all.

    Copies of what was changed are kept in host memory.
    """

    def __init__(self, experts: Sequence[Any]) -> None:
        self._experts = experts
        self._originals: dict[tuple[int, str], torch.Tensor] = {}

    @torch.no_grad()
    def use(self, loras: Sequence[LoraSource]) -> None:
        """These, and no others any more. Raises ModelError for a LoRA of another model."""
        for (number, name), original in self._originals.items():
            self._experts[number].get_parameter(name).copy_(original)
        self._originals.clear()
        for number, expert in enumerate(self._experts):
            parameters = dict(expert.named_parameters())
            for name, total in self._sums(parameters, loras, number).items():
                self._originals[number, name] = parameters[name].cpu().clone()
                parameters[name].copy_(total)

    def _sums(
        self, parameters: Mapping[str, torch.Tensor], loras: Sequence[LoraSource], number: int
    ) -> dict[str, torch.Tensor]:
        """What the parameters of one expert become, of those that change."""
        device = next(iter(parameters.values())).device
        sums: dict[str, torch.Tensor] = {}
        for lora in loras:
            for name, update in _updates(lora, number, num_experts=len(self._experts), device=device):
                parameter = _fitting(parameters, name, update, lora)
                if name not in sums:
                    sums[name] = parameter.to(torch.float32, copy=True)
                sums[name] += update
        return sums


def _fitting(
    parameters: Mapping[str, torch.Tensor], name: str, update: torch.Tensor, lora: LoraSource
) -> torch.Tensor:
    parameter = parameters.get(name)
    if parameter is None or parameter.shape != update.shape:
        found = "no such layer" if parameter is None else f"a layer of {tuple(parameter.shape)}"
        raise ModelError(
            f"the LoRA changes {name}, {tuple(update.shape)}, where the model has {found}: "
            f"{', '.join(map(str, lora.files))}",
            hint="use a LoRA that was trained for this model",
        )
    return parameter


def _updates(
    lora: LoraSource, expert: int, *, num_experts: int, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of an expert's parameters and what is added to them, in fp32 on the device."""
    file = _fetched(lora)[expert if len(lora.files) > 1 else 0]
    state, alpha_frac = _read(file)
    prefix = _PREFIXES[0]
    if len(lora.files) == 1 and num_experts > 1 and any(key.startswith(_PREFIXES[1]) for key in state):
        prefix = _PREFIXES[expert]
    for key, down in state.items():
        if not (key.startswith(prefix) and key.endswith(_DOWN)):
            continue
        module = key.removesuffix(_DOWN)
        alpha = state.get(module + _ALPHA)
        scale = lora.strength * (alpha_frac if alpha is None else float(alpha) / len(down))
        name = module.removeprefix(prefix)
        up = state[module + _UP]
        yield f"{name}.weight", scale * (up.to(device, torch.float32) @ down.to(device, torch.float32))
        if (bias := state.get(module + _UP_BIAS)) is not None:
            yield f"{name}.bias", lora.strength * bias.to(device, torch.float32)


def _read(file: Path) -> tuple[Mapping[str, torch.Tensor], float]:
    """In diffusers' names, and alpha / rank where the file says it for all layers at once."""
    state = WanPipeline.lora_state_dict(load_file(file))
    with safe_open(file, framework="pt") as opened:
        metadata = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
    rank, alpha = metadata.get("transformer.r"), metadata.get("transformer.lora_alpha")
    return state, alpha / rank if rank and alpha else 1.0


def _fetched(lora: LoraSource) -> Sequence[Path]:
    if lora.hub_id is None:
        return lora.files
    commit, _, _ = lora.revision.partition(":")
    folder = fetch_files(lora.hub_id, commit=commit, names=[file.as_posix() for file in lora.files])
    return [folder / file for file in lora.files]
