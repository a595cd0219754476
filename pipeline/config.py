"""What an engine is built from: picklable, frozen, and free of torch so that parents stay light."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from manifests.job import Weights
from pipeline.sampling.recipes import Recipe

# Changes whenever the same job may give other pixels; recorded with every clip.
NUMERICS = "exact-5"


def machine_cache() -> Path:
    """For what was measured on this machine: `vgbatch` in XDG_CACHE_HOME, else in ~/.cache."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "vgbatch"
    home = os.path.expanduser("~")  # unchanged for a user without a home, as services can be
    return Path(tempfile.gettempdir() if home == "~" else home) / ".cache" / "vgbatch"


@dataclass(frozen=True, kw_only=True)
class LoraSource:
    """One low-rank update. strength: what it is multiplied by.

    files: safetensors, one for all experts of a model or one for each; for a hub id relative to its
    repository. revision: of their contents. hub_id: `org/name` to fetch them from, None for local files.
    """

    files: tuple[Path, ...]
    strength: float
    revision: str
    hub_id: str | None = None

    @property
    def label(self) -> str:
        """For messages."""
        return ", ".join(map(str, self.files))


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where the weights of one model come from, and how they are to be sampled.

    weights: as written in the manifest. folder: a diffusers checkpoint; for a hub model its snapshot in the
    local cache, whose weights may not be there yet. base_revision: its content hash or commit. engine: "wan".
    hub_id: `org/name` to fetch missing weights from, None for a folder. recipe: of few-step weights.
    """

    weights: Weights
    folder: Path
    base_revision: str
    engine: str
    hub_id: str | None = None
    loras: tuple[LoraSource, ...] = ()
    recipe: Recipe | None = None

    def has_checkpoint_of(self, other: ModelSource) -> bool:
        return (self.folder, self.base_revision) == (other.folder, other.base_revision)

    @property
    def revision(self) -> str:
        """Of the checkpoint and its LoRAs together, with their strengths, and of how few steps are taken."""
        parts = [f"{lora.revision}={lora.strength!r}" for lora in self.loras]
        if self.recipe is not None:
            parts.append(self.recipe.revision)
        return "+".join([self.base_revision, *parts])


class EmbeddingStore(Protocol):
    """Keeps encoded prompts from run to run, as bytes. It raises nothing: what is lost is encoded again."""

    def get(self, encoder: str, text: str) -> bytes | None: ...

    def put(self, encoder: str, text: str, content: bytes) -> None: ...


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """device: "cpu" or "cuda:0". models: by what jobs ask for.

    dtype: of transformer and text encoder, "float32", "bfloat16", or "auto" until `resolved`.
    embeddings: None to encode every prompt anew.
    """

    device: str
    models: Mapping[Weights, ModelSource]
    dtype: str = "auto"
    machine_cache: Path = field(default_factory=machine_cache)
    embeddings: EmbeddingStore | None = None

    @property
    def attention_choices(self) -> Path:
        """The file that keeps them."""
        return self.machine_cache / "attention.json"

    @property
    def vae_dtype(self) -> str:
        """As the transformer's: on a card an fp32 decode takes as long as a third of a guided denoise."""
        return self.dtype


def resolved(config: EngineConfig) -> EngineConfig:
    """The same config with "auto" decided: float32 on the CPU, bfloat16 on a card."""
    if config.dtype != "auto":
        return config
    return replace(config, dtype="float32" if config.device == "cpu" else "bfloat16")
