"""What an engine is built from: picklable, frozen, and free of torch so that parents stay light."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

# Changes whenever the same job may give other pixels; recorded with every clip.
NUMERICS = "exact-3"


def machine_cache() -> Path:
    """For what was measured on this machine: `vgbatch` in XDG_CACHE_HOME, else in ~/.cache."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "vgbatch"
    home = os.path.expanduser("~")  # unchanged for a user without a home, as services can be
    return Path(tempfile.gettempdir() if home == "~" else home) / ".cache" / "vgbatch"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where the weights of one model come from.

    name: as written in the manifest. folder: a diffusers checkpoint; for a hub model its snapshot in the
    local cache, whose weights may not be there yet. revision: content hash or commit. engine: "wan".
    hub_id: `org/name` to fetch missing weights from, None for a folder.
    """

    name: str
    folder: Path
    revision: str
    engine: str
    hub_id: str | None = None


class EmbeddingStore(Protocol):
    """Keeps encoded prompts from run to run, as bytes. It raises nothing: what is lost is encoded again."""

    def get(self, encoder: str, text: str) -> bytes | None: ...

    def put(self, encoder: str, text: str, content: bytes) -> None: ...


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """device: "cpu" or "cuda:0". models: by name as written.

    dtype: of transformer and text encoder, "float32", "bfloat16", or "auto" until `resolved`.
    embeddings: None to encode every prompt anew.
    """

    device: str
    models: Mapping[str, ModelSource]
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
