"""From what a manifest says of LoRAs to their files, checked as far as is possible without torch.

A LoRA is a safetensors file; or a folder with one, or with one for each expert of a model that has two, named
after `high_noise` and `low_noise`; or a hub id with a file or folder of its repository, such as
`org/name@revision:folder`. Several are joined by commas, and `=0.8` behind one is its strength.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

from manifests.errors import ModelError
from pipeline.config import LoraSource
from pipeline.models.hub import fetch_configs, fetch_tensor_shapes, parse_hub_id
from pipeline.models.lora_fit import Shape, by_expert, changes_of, require_fit, wan_layers
from pipeline.sampling.recipes import FILE_NAME, Recipe, published_recipe, read_recipe

UNREADABLE_HINT = "use another file; a LoRA is one that diffusers' WanPipeline loads"
_VALID = "a LoRA is a .safetensors file, a folder with one, or a hub id such as org/name@revision:file"
_MOST_STRENGTH = 100
_SUFFIX = ".safetensors"
_OF_A_CHECKPOINT = "model_index.json"
_USUAL_NAME = "pytorch_lora_weights.safetensors"
_EXPERTS = ("high_noise", "low_noise")
_MARKS = ("lora_A", "lora_down", "lora.down")


@dataclass(frozen=True, kw_only=True)
class FoundLora:
    """recipe: where the LoRA is a few-step one."""

    source: LoraSource
    recipe: Recipe | None


def find_loras(text: str) -> list[FoundLora]:
    """Every LoRA of a `lora` column. Raises ModelError."""
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entries):
        raise ModelError(f"a comma without a LoRA on both sides: {text}", hint=_VALID)
    return [find_lora(entry) for entry in entries]


def without_few_step(text: str) -> str | None:
    """What is left of a `lora` column without its few-step LoRAs; None for nothing. Raises ModelError."""
    entries = [entry for entry in text.split(",") if find_lora(entry.strip()).recipe is None]
    return ",".join(entries) or None


def find_lora(entry: str) -> FoundLora:
    """One LoRA, as written. Raises ModelError."""
    name, strength = _split_strength(entry)
    if not name:
        raise ModelError(f"a strength without a LoRA: {entry!r}", hint=_VALID)
    if (path := _local(name)) is not None:
        return _from_path(path, label=name, strength=strength)
    repo, _, part = name.partition(":")
    if (hub_id := parse_hub_id(repo)) is None or name.startswith("."):
        raise ModelError(f"no such file or folder, and not a hub id: {name}", hint=_VALID)
    return _from_hub(*hub_id, part=part, label=name, strength=strength)


def _split_strength(entry: str) -> tuple[str, float]:
    name, equals, number = entry.rpartition("=")
    if not equals or _local(entry) is not None:
        return entry, 1.0
    try:
        strength = float(number)
    except ValueError:
        strength = math.nan
    if not 0 < abs(strength) <= _MOST_STRENGTH:
        raise ModelError(
            f"strength `{number}` of a LoRA: {entry}", hint=f"a number other than 0, at most {_MOST_STRENGTH}"
        )
    return name.strip(), strength


def _local(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path.absolute() if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null character, `~` without a home
        return None


def _from_path(path: Path, *, label: str, strength: float) -> FoundLora:
    folder = path if path.is_dir() else path.parent
    try:
        inside = sorted(file.name for file in folder.iterdir() if file.is_file())
    except OSError as error:
        raise ModelError(f"cannot be listed: {folder}: {error.strerror}", hint=_VALID) from error
    if path != folder and path.name not in inside:
        raise ModelError(f"neither a file nor a folder: {label}", hint=_VALID)
    files = [folder / name for name in _chosen(inside if path == folder else [path.name], label=label)]
    for file in files:
        tensor_shapes(file)
    source = LoraSource(files=tuple(files), strength=strength, revision=contents_revision(files))
    is_all = path == folder or [name for name in inside if name.endswith(_SUFFIX)] == [path.name]
    return FoundLora(source=source, recipe=_own_recipe(folder) if is_all else None)


def require_fit_by_shapes(lora: LoraSource, config: Mapping[str, Any], *, num_experts: int) -> None:
    """Raises ModelError for a LoRA that a model's experts have no place for, by the headers of its files.

    config: as in the checkpoint's transformer/config.json. Of a hub's file that cannot be asked for now, this
    is told when it is loaded.
    """
    headers = [_header(lora, file) for file in lora.files]
    known = [header for header in headers if header is not None]
    if len(known) < len(headers):
        return
    try:
        files = [changes_of(header) for header in known]
    except ValueError as error:
        raise ModelError(
            f"a LoRA that cannot be read: {lora.label}: {error}", hint=UNREADABLE_HINT
        ) from error
    layers = [wan_layers(config)] * num_experts
    require_fit(lora, by_expert(files, num_experts=num_experts), layers=layers)


def _header(lora: LoraSource, file: Path) -> dict[str, Shape] | None:
    if lora.hub_id is None:
        return tensor_shapes(file)
    commit, _, _ = lora.revision.partition(":")
    found = fetch_tensor_shapes(lora.hub_id, commit=commit, name=file.as_posix())
    return found if found is None else _require_updates(found, label=f"{lora.hub_id}:{file}")


def _own_recipe(folder: Path) -> Recipe | None:
    """Of the LoRA in the folder, unless that is a checkpoint's or has another LoRA in mind."""
    file = folder / FILE_NAME
    if (folder / _OF_A_CHECKPOINT).is_file() or not file.is_file():
        return None
    recipe = read_recipe(file)
    return recipe if recipe.lora is None else None


def _from_hub(repo: str, revision: str | None, *, part: str, label: str, strength: float) -> FoundLora:
    snapshot = fetch_configs(repo, revision=revision)
    folder = part.strip("/")
    inside = [name for name in snapshot.files if name == folder or name.rpartition("/")[0] == folder]
    names = _chosen(sorted(inside), label=label)
    source = LoraSource(
        files=tuple(map(Path, names)),
        strength=strength,
        revision=f"{snapshot.commit}:{','.join(names)}",
        hub_id=repo,
    )
    return FoundLora(source=source, recipe=published_recipe(repo))


def _chosen(names: Sequence[str], *, label: str) -> list[str]:
    """The file for all experts, or that of each, in their order."""
    files = [name for name in names if name.endswith(_SUFFIX)]
    usual = [name for name in files if name.rpartition("/")[2] == _USUAL_NAME]
    if len(files) == 1 or usual:
        return usual or files
    of_experts = [[name for name in files if expert in name.lower()] for expert in _EXPERTS]
    if all(len(found) == 1 for found in of_experts):
        return [found[0] for found in of_experts]
    raise ModelError(f"{len(files)} safetensors files, so none is the LoRA: {label}", hint=_VALID)


def tensor_shapes(file: Path) -> dict[str, Shape]:
    """By the names of a LoRA's tensors, from its header. Raises ModelError."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(size, file.stat().st_size)))
        header.pop("__metadata__", None)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
        ends = [entry["data_offsets"][1] for entry in header.values()]
        if 8 + size + max(ends, default=0) > file.stat().st_size:
            raise ValueError("cut short")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ModelError(f"not a safetensors file, or cut short: {file}", hint=_VALID) from error
    return _require_updates(shapes, label=str(file))


def _require_updates(shapes: dict[str, Shape], *, label: str) -> dict[str, Shape]:
    if not any(mark in name for name in shapes for mark in _MARKS):
        raise ModelError(f"no low-rank updates in it: {label}", hint=_VALID)
    return shapes


def contents_revision(files: Sequence[Path]) -> str:
    """Raises ModelError where one is gone."""
    digests = []
    for file in files:
        try:
            with file.open("rb") as stream:
                digests.append(file_digest(stream, "sha256").hexdigest())
        except OSError as error:
            raise ModelError(f"a LoRA that cannot be read: {file}: {error.strerror}", hint=_VALID) from error
    return ",".join(digests)
