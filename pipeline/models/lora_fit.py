"""Whether LoRAs fit a Wan transformer, told by names and shapes alone. No torch here.

Names are diffusers' own below a prefix for each expert, or the original ones, or musubi-tuner's; they mean
what diffusers' WanPipeline makes of them when the weights are loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from manifests.errors import ModelError
from pipeline.config import LoraSource

PREFIXES = ("transformer.", "transformer_2.")
DOWN, UP, UP_BIAS = ".lora_A.weight", ".lora_B.weight", ".lora_B.bias"

Shape = tuple[int, ...]
T = TypeVar("T")

_ORIGINAL, _MUSUBI = "diffusion_model.", "lora_unet_"
_OF_A_BLOCK = {
    **{f"self_attn.{one}": f"attn1.to_{one}" for one in "qkv"},
    **{f"cross_attn.{one}": f"attn2.to_{one}" for one in "qkv"},
    "self_attn.o": "attn1.to_out.0",
    "cross_attn.o": "attn2.to_out.0",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
_AROUND_BLOCKS = {
    "time_projection.1": "condition_embedder.time_proj",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "head.head": "proj_out",
}
_OF_A_MUSUBI_BLOCK = {name.replace(".", "_"): ours for name, ours in _OF_A_BLOCK.items()}
_SUFFIXES = {DOWN: DOWN, UP: UP, ".lora_down.weight": DOWN, ".lora_up.weight": UP, ".diff_b": UP_BIAS}
_DORA = ("lora_magnitude_vector", "dora_scale")
_OF_ANOTHER = "use a LoRA that was trained for this model"


def wan_layers(config: Mapping[str, Any]) -> dict[str, Shape]:
    """The shape of every parameter that a LoRA can change.

    config: as in a checkpoint's transformer/config.json, checked; what it leaves out is diffusers' default.
    """
    channels = config["num_attention_heads"] * config["attention_head_dim"]
    square = (channels, channels)
    block = dict.fromkeys(_OF_A_BLOCK.values(), square)
    block |= {"ffn.net.0.proj": (config["ffn_dim"], channels), "ffn.net.2": (channels, config["ffn_dim"])}
    out_channels = config.get("out_channels", 16) or config["in_channels"]
    around = "condition_embedder."
    matrices = {
        f"{around}time_embedder.linear_1": (channels, config.get("freq_dim", 256)),
        f"{around}time_embedder.linear_2": square,
        f"{around}time_proj": (6 * channels, channels),
        f"{around}text_embedder.linear_1": (channels, config.get("text_dim", 4096)),
        f"{around}text_embedder.linear_2": square,
        "proj_out": (out_channels * math.prod(config["patch_size"]), channels),
    }
    for number in range(config["num_layers"]):
        matrices |= {f"blocks.{number}.{name}": shape for name, shape in block.items()}
    weights = {f"{name}.weight": shape for name, shape in matrices.items()}
    return weights | {f"{name}.bias": shape[:1] for name, shape in matrices.items()}


def changes_of(tensors: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """By prefix, the parameters that a file's tensors change, and the shapes of the changes.

    Raises ValueError for what is no product of two matrices.
    """
    refuse_dora(tensors)
    named = _in_our_names(tensors)
    changes: dict[str, dict[str, Shape]] = {prefix: {} for prefix in PREFIXES}
    for key, down in named.items():
        prefix = next((prefix for prefix in PREFIXES if key.startswith(prefix)), None)
        if prefix is None or not key.endswith(DOWN):
            continue
        module = key.removesuffix(DOWN)
        up, bias = named.get(module + UP), named.get(module + UP_BIAS)
        name = module.removeprefix(prefix)
        changes[prefix][f"{name}.weight"] = product_shape(module, up=up, down=down)
        if bias is not None:
            changes[prefix][f"{name}.bias"] = bias
    return changes


def refuse_dora(names: Iterable[str]) -> None:
    """Raises ValueError. names: as in the file, since diffusers leaves out some of a DoRA's own."""
    if odd := next((name for name in names if any(mark in name for mark in _DORA)), None):
        raise ValueError(f"{odd} is of a DoRA, which is more than a sum of products")


def product_shape(module: str, *, up: Shape | None, down: Shape) -> Shape:
    """Raises ValueError for what cannot be multiplied. module: for messages."""
    if up is None or len(down) != 2 or len(up) != 2 or not 0 < up[1] == down[0]:
        raise ValueError(f"{module} is no product of two matrices: {up or 'none'} and {down}")
    return up[0], down[1]


def by_expert(files: Sequence[Mapping[str, dict[str, T]]], *, num_experts: int) -> list[dict[str, T]]:
    """What the files of one LoRA hold, by prefix, given to the experts of a model."""
    if len(files) > 1:
        assert len(files) == num_experts, len(files)  # told when the files were found
        first = PREFIXES[0]
        return [changes[own] or changes[first] for changes, own in zip(files, PREFIXES, strict=True)]
    (changes,) = files
    if num_experts > 1 and changes[PREFIXES[1]]:
        return [changes[prefix] for prefix in PREFIXES]
    return [changes[PREFIXES[0]]] * num_experts


def require_fit(
    lora: LoraSource, changes: Sequence[Mapping[str, Shape]], *, layers: Sequence[Mapping[str, Shape]]
) -> None:
    """Raises ModelError for a LoRA of another model. changes, layers: for each expert, by parameter."""
    for own, expert in zip(changes, layers, strict=True):
        for name, shape in own.items():
            if (layer := expert.get(name)) != shape:
                found = "no such layer" if layer is None else f"a layer of {layer}"
                raise ModelError(
                    f"the LoRA changes {name}, {shape}, where the model has {found}: {lora.label}",
                    hint=_OF_ANOTHER,
                )
    if not (all(changes) if len(lora.files) > 1 else any(changes)):
        raise ModelError(f"no layer of the model is in the LoRA: {lora.label}", hint=_OF_ANOTHER)


def _in_our_names(tensors: Mapping[str, Shape]) -> dict[str, Shape]:
    if any(name.startswith(_ORIGINAL) for name in tensors):
        named = {_renamed(name, _ORIGINAL, _from_original): shape for name, shape in tensors.items()}
        return named | _full_head(tensors)
    if any(name.startswith(_MUSUBI) for name in tensors):
        return {_renamed(name, _MUSUBI, _from_musubi): shape for name, shape in tensors.items()}
    return dict(tensors)


def _renamed(name: str, prefix: str, module_of: Callable[[str], str | None]) -> str:
    """The name of a layer that is not known stays as written, so that it fits no model."""
    for theirs, ours in _SUFFIXES.items():
        if name.endswith(theirs):
            module = name.removesuffix(theirs)
            return f"{PREFIXES[0]}{module_of(module.removeprefix(prefix)) or module}{ours}"
    return name


def _from_original(module: str) -> str | None:
    if (match := re.fullmatch(r"blocks\.(\d+)\.(.+)", module)) is None:
        return _AROUND_BLOCKS.get(module)
    name = _OF_A_BLOCK.get(match[2])
    return name and f"blocks.{match[1]}.{name}"


def _from_musubi(module: str) -> str | None:
    match = re.fullmatch(r"blocks_(\d+)_(.+)", module)
    name = match and _OF_A_MUSUBI_BLOCK.get(match[2])
    return name and match and f"blocks.{match[1]}.{name}"


def _full_head(tensors: Mapping[str, Shape]) -> dict[str, Shape]:
    """A last layer that is given whole, which diffusers makes a product with the identity."""
    head, bias = (tensors.get(f"{_ORIGINAL}head.head.{suffix}") for suffix in ("diff", "diff_b"))
    if not head or not bias:
        return {}
    name = f"{PREFIXES[0]}proj_out"
    return {name + DOWN: head, name + UP: (bias[0], head[0])}
