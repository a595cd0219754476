"""Low-rank updates (Hu et al. 2021) added to the weights of loaded transformers.

Files may be in any format that diffusers reads for Wan. An update is strength * alpha / rank * B A, summed in
fp32 and rounded once for all updates of a weight. Taking it off again would leave rounding behind, so weights
are restored from copies of what they were.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from manifests.errors import ModelError
from pipeline.config import LoraSource
from pipeline.models.hub import fetch_files
from pipeline.models.lora_files import contents_revision

_DOWN, _UP, _UP_BIAS, _ALPHA = ".lora_A.weight", ".lora_B.weight", ".lora_B.bias", ".alpha"
_PREFIXES = ("transformer.", "transformer_2.")
# What a file that is no LoRA makes of safetensors, of diffusers' conversion of names, and of us.
_UNREADABLE = (SafetensorError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)
_OF_ANOTHER = "use a LoRA that was trained for this model"


@dataclass(frozen=True, kw_only=True)
class _Update:
    """What is added to one parameter: scale times up @ down, or times a bias alone."""

    scale: float
    up: torch.Tensor
    down: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.up.shape) if self.down is None else (self.up.shape[0], self.down.shape[1])

    def on(self, device: torch.device) -> torch.Tensor:
        up = self.up.to(device, torch.float32)
        return self.scale * (up if self.down is None else up @ self.down.to(device, torch.float32))


class FusedLoras:
    """The LoRAs in the weights of a model's experts, diffusers modules all.

    Copies of what was changed are kept in host memory.
    """

    def __init__(self, experts: Sequence[Any]) -> None:
        self._experts = experts
        self._originals: dict[tuple[int, str], torch.Tensor] = {}

    @torch.no_grad()
    def use(self, loras: Sequence[LoraSource]) -> None:
        """These, and no others any more.

        Raises ModelError for one of another model, or that cannot be read; the weights are then as before.
        """
        updates = self._updates(loras)
        for (number, name), original in self._originals.items():
            self._experts[number].get_parameter(name).copy_(original)
        self._originals.clear()
        for (number, name), terms in updates.items():
            parameter = self._experts[number].get_parameter(name)
            self._originals[number, name] = parameter.cpu().clone()
            total = parameter.to(torch.float32, copy=True)
            for term in terms:
                total += term.on(parameter.device)
            parameter.copy_(total)

    def _updates(self, loras: Sequence[LoraSource]) -> Mapping[tuple[int, str], list[_Update]]:
        """By the number of an expert and the name of its parameter, in the order of the LoRAs."""
        updates: dict[tuple[int, str], list[_Update]] = defaultdict(list)
        parameters = [dict(expert.named_parameters()) for expert in self._experts]
        for lora in loras:
            of_experts = _of_experts(lora, num_experts=len(self._experts))
            for number, own in enumerate(of_experts):
                for name, update in own.items():
                    _require_fit(parameters[number], name, update, lora)
                    updates[number, name].append(update)
            if not any(of_experts):
                raise ModelError(f"no layer of the model is in the LoRA: {_label(lora)}", hint=_OF_ANOTHER)
        return updates


def _require_fit(
    parameters: Mapping[str, torch.Tensor], name: str, update: _Update, lora: LoraSource
) -> None:
    parameter = parameters.get(name)
    if parameter is None or tuple(parameter.shape) != update.shape:
        found = "no such layer" if parameter is None else f"a layer of {tuple(parameter.shape)}"
        raise ModelError(
            f"the LoRA changes {name}, {update.shape}, where the model has {found}: {_label(lora)}",
            hint=_OF_ANOTHER,
        )


def _label(lora: LoraSource) -> str:
    return ", ".join(map(str, lora.files))


def _of_experts(lora: LoraSource, *, num_experts: int) -> list[dict[str, _Update]]:
    """For each expert the updates by the names of its parameters."""
    files = _fetched(lora)
    try:
        read = [_read(file, strength=lora.strength) for file in files]
    except _UNREADABLE as error:
        raise ModelError(
            f"a LoRA that cannot be read: {_label(lora)}: {str(error).strip() or type(error).__name__}",
            hint="use another file; a LoRA is one that diffusers' WanPipeline loads",
        ) from error
    if len(read) > 1:
        return [updates[_PREFIXES[0]] for updates in read]
    (updates,) = read
    if num_experts > 1 and updates[_PREFIXES[1]]:
        return [updates[prefix] for prefix in _PREFIXES]
    return [updates[_PREFIXES[0]]] * num_experts


def _read(file: Path, *, strength: float) -> dict[str, dict[str, _Update]]:
    """By what modules are below in diffusers' names, and by the parameter that they change there."""
    state = WanPipeline.lora_state_dict(load_file(file))
    alpha_frac = _common_alpha_frac(file)
    updates: dict[str, dict[str, _Update]] = {prefix: {} for prefix in _PREFIXES}
    used = set()
    for key, down in state.items():
        prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), None)
        if prefix is None or not key.endswith(_DOWN):
            continue
        module = key.removesuffix(_DOWN)
        name = module.removeprefix(prefix)
        alpha, up, bias = (state.get(module + suffix) for suffix in (_ALPHA, _UP, _UP_BIAS))
        if up is None or down.dim() != 2 or up.dim() != 2 or up.shape[1] != down.shape[0]:
            shapes = " and ".join("none" if part is None else str(tuple(part.shape)) for part in (up, down))
            raise ValueError(f"{module} is no product of two matrices: {shapes}")
        scale = strength * (alpha_frac if alpha is None else float(alpha) / len(down))
        updates[prefix][f"{name}.weight"] = _Update(scale=scale, up=up, down=down)
        if bias is not None:
            updates[prefix][f"{name}.bias"] = _Update(scale=strength, up=bias)
        used |= {module + suffix for suffix in (_DOWN, _UP, _UP_BIAS, _ALPHA)}
    if unused := sorted(state.keys() - used):
        print(
            f"warning: {len(unused)} of {len(state)} tensors of a LoRA are none that it can be made of, "
            f"such as {unused[0]}, and are left out: {file}",
            file=sys.stderr,
        )
    return updates


def _common_alpha_frac(file: Path) -> float:
    """alpha / rank where the file says it for all layers at once."""
    with safe_open(file, framework="pt") as opened:
        metadata = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
    rank, alpha = metadata.get("transformer.r"), metadata.get("transformer.lora_alpha")
    return float(alpha) / float(rank) if rank and alpha else 1.0


def _fetched(lora: LoraSource) -> Sequence[Path]:
    """Raises ModelError for files that are others by now."""
    if lora.hub_id is None:
        if contents_revision(lora.files) != lora.revision:
            raise ModelError(
                f"the LoRA has changed since the plan was made: {_label(lora)}",
                hint="run again, and keep a file as it is while it is in use",
            )
        return lora.files
    commit, _, _ = lora.revision.partition(":")
    folder = fetch_files(lora.hub_id, commit=commit, names=[file.as_posix() for file in lora.files])
    return [folder / file for file in lora.files]
