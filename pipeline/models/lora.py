"""Low-rank updates (Hu et al. 2021) added to the weights of loaded transformers.

Files may be in any format that diffusers reads for Wan. An update is strength * alpha / rank * B A, summed in
fp32 and rounded once for all updates of a weight. Taking it off again would leave rounding behind, so weights
are restored from copies of what they were.
"""

from __future__ import annotations

import json
import math
import re
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
from pipeline.models.lora_files import UNREADABLE_HINT, contents_revision
from pipeline.models.lora_fit import (
    DOWN,
    PREFIXES,
    UP,
    UP_BIAS,
    by_expert,
    product_shape,
    refuse_dora,
    require_fit,
)

_ALPHA = ".alpha"
# What a file that is no LoRA makes of safetensors, of diffusers' conversion of names, and of us.
_UNREADABLE = (
    SafetensorError,
    OSError,
    LookupError,
    ArithmeticError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    re.error,
)


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
        layers = [
            {name: tuple(parameter.shape) for name, parameter in expert.named_parameters()}
            for expert in self._experts
        ]
        for lora in loras:
            of_experts = by_expert(_read_files(lora), num_experts=len(self._experts))
            shapes = [{name: update.shape for name, update in own.items()} for own in of_experts]
            require_fit(lora, shapes, layers=layers)
            for number, own in enumerate(of_experts):
                for name, update in own.items():
                    updates[number, name].append(update)
        return updates


def _read_files(lora: LoraSource) -> list[dict[str, dict[str, _Update]]]:
    files = _fetched(lora)
    try:
        return [_read(file, strength=lora.strength) for file in files]
    except _UNREADABLE as error:
        raise ModelError(
            f"a LoRA that cannot be read: {lora.label}: {str(error).strip() or type(error).__name__}",
            hint=UNREADABLE_HINT,
        ) from error


def _read(file: Path, *, strength: float) -> dict[str, dict[str, _Update]]:
    """By what modules are below in diffusers' names, and by the parameter that they change there."""
    tensors = load_file(file)
    refuse_dora(tensors)
    state = WanPipeline.lora_state_dict(tensors)
    metadata = _metadata(file)
    updates: dict[str, dict[str, _Update]] = {prefix: {} for prefix in PREFIXES}
    used = set()
    for key, down in state.items():
        prefix = next((prefix for prefix in PREFIXES if key.startswith(prefix)), None)
        if prefix is None or not key.endswith(DOWN):
            continue
        module = key.removesuffix(DOWN)
        name = module.removeprefix(prefix)
        alpha, up, bias = (state.get(module + suffix) for suffix in (_ALPHA, UP, UP_BIAS))
        product_shape(module, up=None if up is None else tuple(up.shape), down=tuple(down.shape))
        assert up is not None
        if not all(bool(part.isfinite().all()) for part in (up, down, alpha, bias) if part is not None):
            raise ValueError(f"{module} has values that are no numbers")
        rank = len(down)
        frac = _alpha_frac(metadata, prefix, name, rank) if alpha is None else float(alpha) / rank
        updates[prefix][f"{name}.weight"] = _Update(scale=strength * frac, up=up, down=down)
        if bias is not None:
            updates[prefix][f"{name}.bias"] = _Update(scale=strength * frac, up=bias)
        used |= {module + suffix for suffix in (DOWN, UP, UP_BIAS, _ALPHA)}
    if unused := sorted(state.keys() - used):
        print(
            f"warning: {len(unused)} of {len(state)} tensors of a LoRA are left out, as they are no part of "
            f"a product of two matrices, such as {unused[0]}: {file}",
            file=sys.stderr,
        )
    return updates


def _metadata(file: Path) -> Mapping[str, Any]:
    """What peft had for a configuration, where the file says so, its keys under the prefix of an expert."""
    with safe_open(file, framework="pt") as opened:
        found = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
    if not isinstance(found, dict):
        raise TypeError("lora_adapter_metadata is no table")
    return found


def _alpha_frac(metadata: Mapping[str, Any], prefix: str, name: str, rank: int) -> float:
    """What a module's product is multiplied by, as in peft's LoraConfig; 1 where nothing is said."""
    patterns = metadata.get(f"{prefix}alpha_pattern") or {}
    alpha = metadata.get(f"{prefix}lora_alpha")
    for pattern, own in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            alpha = own
            break
    if metadata.get(f"{prefix}use_dora"):
        raise ValueError("a DoRA, which is more than a sum of products")
    if alpha is None:
        return 1.0
    if not math.isfinite(float(alpha)):
        raise ValueError(f"alpha is {alpha}")
    return float(alpha) / (math.sqrt(rank) if metadata.get(f"{prefix}use_rslora") else rank)


def _fetched(lora: LoraSource) -> Sequence[Path]:
    """Raises ModelError for files that are others by now."""
    if lora.hub_id is None:
        if contents_revision(lora.files) != lora.revision:
            raise ModelError(
                f"the LoRA has changed since the plan was made: {lora.label}",
                hint="run again, and keep a file as it is while it is in use",
            )
        return lora.files
    commit, _, _ = lora.revision.partition(":")
    folder = fetch_files(lora.hub_id, commit=commit, names=[file.as_posix() for file in lora.files])
    return [folder / file for file in lora.files]
