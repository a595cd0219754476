"""What an engine is built from: picklable, frozen, and free of torch so that parents stay light."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

# Changes whenever the same job may give other pixels; recorded with every clip.
NUMERICS = "exact-1"


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


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """device: "cpu" or "cuda:0". models: by name as written.

    dtype: of transformer and text encoder, "float32", "bfloat16", or "auto" until `resolved`.
    """

    device: str
    models: Mapping[str, ModelSource]
    dtype: str = "auto"

    @property
    def vae_dtype(self) -> str:
        return "float32"  # the documented default of Wan pipelines: bf16 decoding changes the pixels


def resolved(config: EngineConfig) -> EngineConfig:
    """The same config with "auto" decided: float32 on the CPU, bfloat16 on a card."""
    if config.dtype != "auto":
        return config
    return replace(config, dtype="float32" if config.device == "cpu" else "bfloat16")
