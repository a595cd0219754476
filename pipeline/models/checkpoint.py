"""Reads and checks the JSON configs of a diffusers Wan checkpoint. No torch here: planning needs no GPU.

Everything that would stop the weights from loading, and can be told without them, is told here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.errors import ModelError
from pipeline.sampling.levels import sampler_settings
from pipeline.sampling.recipes import FILE_NAME as FEW_STEP_FILE

OVERRIDES_FILE = "vgbatch.json"

_TRANSFORMER_SIZES = ("num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim")
_HINT = (
    "a model is a diffusers text-to-video WanPipeline: model_index.json, tokenizer/, text_encoder/, vae/, "
    "transformer/ and scheduler/, with safetensors weights"
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The configs of one checkpoint. files: names relative to folder that make up the model."""

    label: str
    folder: Path
    files: tuple[str, ...]
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    overrides: Mapping[str, Any]
    boundary_ratio: float | None
    expand_timesteps: bool

    @property
    def two_experts(self) -> bool:
        return self.boundary_ratio is not None

    @property
    def patch_pixels(self) -> int:
        return int(self.vae.get("scale_factor_spatial", 8)) * int(self.transformer["patch_size"][1])

    @property
    def temporal(self) -> int:
        return int(self.vae.get("scale_factor_temporal", 4))

    @property
    def longest_axis(self) -> int:
        """Tokens along one axis that have a rotary position."""
        return int(self.transformer.get("rope_max_seq_len", 1024))

    @property
    def flow_shift(self) -> float:
        return float(self.scheduler.get("flow_shift", self.scheduler.get("shift", 1.0)))


def read_checkpoint(folder: Path, *, label: str, files: Collection[str]) -> Checkpoint:
    """The checked configs of a folder. label: the model in messages.

    files: every file of the checkpoint, also those not fetched yet. Raises ModelError.
    """
    index = _read_index(folder, label, files)
    components = [name for name, entry in index.items() if _is_component(entry)]
    two_experts = "transformer_2" in components and index.get("boundary_ratio") is not None
    _check_components(label, components, needs_second=index.get("boundary_ratio") is not None)
    for component in _weighted(two_experts):
        _check_weights(folder, component, label, files)
    checkpoint = Checkpoint(
        label=label,
        folder=folder,
        files=tuple(sorted(_model_files(files, components))),
        transformer=_read_config(folder, "transformer/config.json", label, files),
        vae=_read_config(folder, "vae/config.json", label, files),
        scheduler=_read_config(folder, "scheduler/scheduler_config.json", label, files),
        overrides=_read_overrides(folder, label, files),
        boundary_ratio=index["boundary_ratio"] if two_experts else None,
        expand_timesteps=bool(index.get("expand_timesteps", False)),
    )
    _check_tokenizer(label, files)
    _check_numbers(checkpoint)
    _check_transformer(checkpoint)
    _check_scheduler(checkpoint)
    return checkpoint


def _read_index(folder: Path, label: str, files: Collection[str]) -> dict[str, Any]:
    if "model_index.json" not in files:
        raise ModelError(f"no model_index.json, so not a diffusers checkpoint: {label}", hint=_HINT)
    index = _read_json(folder / "model_index.json", label)
    pipeline = index.get("_class_name")
    if pipeline != "WanPipeline":
        raise ModelError(f"the pipeline `{pipeline}` is not WanPipeline: {label}", hint=_HINT)
    return index


def _is_component(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and None not in entry


def _check_components(label: str, components: list[str], *, needs_second: bool) -> None:
    needed = ["tokenizer", "text_encoder", "vae", "transformer", "scheduler"]
    missing = [name for name in [*needed, *["transformer_2"] * needs_second] if name not in components]
    if missing:
        raise ModelError(f"model_index.json names no {', no '.join(missing)}: {label}", hint=_HINT)


def _weighted(two_experts: bool) -> Iterator[str]:
    """Components with weights, in the order they are loaded."""
    yield from ("text_encoder", "vae", "transformer")
    if two_experts:
        yield "transformer_2"


def _check_weights(folder: Path, component: str, label: str, files: Collection[str]) -> None:
    present = [name.removeprefix(f"{component}/") for name in files if name.startswith(f"{component}/")]
    if not present:
        raise ModelError(f"the folder {component}/ is missing: {label}", hint=_HINT)
    index = next((name for name in present if name.endswith(".safetensors.index.json")), None)
    if index is not None:
        shards = set(_read_json(folder / component / index, label).get("weight_map", {}).values())
        if missing := sorted(shards - set(present)):
            raise ModelError(
                f"{len(missing)} of {len(shards)} weight files are missing from {component}/, "
                f"first {missing[0]}: {label}",
                hint="download the checkpoint again",
            )
    elif not any(name.endswith(".safetensors") for name in present):
        pickles = [name for name in present if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        instead = f", only {pickles[0]}" if pickles else ""
        raise ModelError(
            f"no safetensors weights in {component}/{instead}: {label}",
            hint="only safetensors are loaded: pickled weights can run code; save the pipeline again with "
            "`save_pretrained(..., safe_serialization=True)`",
        )


def _check_tokenizer(label: str, files: Collection[str]) -> None:
    if not {"tokenizer/tokenizer.json", "tokenizer/spiece.model"} & set(files):
        raise ModelError(f"neither tokenizer.json nor spiece.model in tokenizer/: {label}", hint=_HINT)


def _check_numbers(checkpoint: Checkpoint) -> None:
    boundary_ratio = checkpoint.boundary_ratio
    numbers = {
        "scale_factor_spatial of the vae": checkpoint.vae.get("scale_factor_spatial", 8),
        "scale_factor_temporal of the vae": checkpoint.vae.get("scale_factor_temporal", 4),
        "rope_max_seq_len of the transformer": checkpoint.transformer.get("rope_max_seq_len", 1024),
        **{f"{name} of the transformer": checkpoint.transformer.get(name) for name in _TRANSFORMER_SIZES},
        "flow_shift of the scheduler": checkpoint.scheduler.get("flow_shift", 1.0),
        "shift of the scheduler": checkpoint.scheduler.get("shift", 1.0),
        "boundary_ratio of model_index.json": 1 if boundary_ratio is None else boundary_ratio,
    }
    for name, value in numbers.items():
        if type(value) not in (int, float) or not value > 0:
            raise ModelError(f"{name} is not a number above 0, {value!r}: {checkpoint.label}", hint=_HINT)


def _check_transformer(checkpoint: Checkpoint) -> None:
    config, label = checkpoint.transformer, checkpoint.label
    name = config.get("_class_name")
    if name != "WanTransformer3DModel":
        raise ModelError(f"the transformer is `{name}`, not WanTransformer3DModel: {label}", hint=_HINT)
    channels, latents = config.get("in_channels"), checkpoint.vae.get("z_dim")
    if config.get("image_dim") or config.get("added_kv_proj_dim") or channels != latents:
        raise ModelError(
            f"the transformer takes more than text and {latents} latent channels, as image-to-video "
            f"models do: {label}",
            hint="use the text-to-video checkpoint of the family",
        )
    patch = config.get("patch_size")
    if not (isinstance(patch, list) and len(patch) == 3 and patch[0] == 1 and patch[1] == patch[2]):
        raise ModelError(f"patch_size {patch} of the transformer is not [1, n, n]: {label}", hint=_HINT)


def _check_scheduler(checkpoint: Checkpoint) -> None:
    try:
        sampler_settings(checkpoint.scheduler)
    except ModelError as error:
        raise ModelError(f"{error.message}: {checkpoint.label}", hint=error.hint) from None


def _read_config(folder: Path, name: str, label: str, files: Collection[str]) -> dict[str, Any]:
    if name not in files:
        raise ModelError(f"the file {name} is missing: {label}", hint=_HINT)
    return _read_json(folder / name, label)


def _read_overrides(folder: Path, label: str, files: Collection[str]) -> dict[str, Any]:
    return _read_json(folder / OVERRIDES_FILE, label) if OVERRIDES_FILE in files else {}


def _read_json(file: Path, label: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
        raise ModelError(
            f"{file.name} cannot be read, {error}: {label}", hint="copy or download the checkpoint again"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(f"{file.name} holds no JSON object: {label}", hint=_HINT)
    return content


def _model_files(files: Collection[str], components: list[str]) -> Iterator[str]:
    """What decides the pixels: not the model card, not a file somebody left beside it."""
    for name in files:
        folder, _, rest = name.partition("/")
        hidden = any(part.startswith(".") for part in name.split("/"))
        if name in ("model_index.json", OVERRIDES_FILE, FEW_STEP_FILE) or (
            rest and folder in components and not hidden
        ):
            yield name
