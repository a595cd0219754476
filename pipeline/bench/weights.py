"""Where the modules of a bench come from: drawn at random, or read from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from transformers import AutoTokenizer, UMT5EncoderModel

from pipeline.models import random_weights
from pipeline.models.shapes import Shape

_SEED = 20_261
_TOKENIZER = Path(__file__).parent.parent / "models" / "tiny" / "tokenizer"


class Weights(Protocol):
    """A diffusers module at each call, equal to the last one's but a copy of its own. VAEs are in fp32."""

    @property
    def shape(self) -> Shape: ...

    def transformer(self, expert: int, *, device: str, dtype: torch.dtype) -> Any: ...

    def vae(self, *, device: str) -> Any: ...

    def text_encoder(self, *, device: str, dtype: torch.dtype) -> Any: ...

    def tokenizer(self) -> Any: ...


@dataclass(frozen=True)
class RandomWeights:
    shape: Shape

    def transformer(self, expert: int, *, device: str, dtype: torch.dtype) -> Any:
        config = self.shape.transformer
        return random_weights.random_transformer(config, device=device, dtype=dtype, seed=_SEED + expert)

    def vae(self, *, device: str) -> Any:
        return random_weights.random_vae(self.shape.vae, device=device, seed=_SEED)

    def text_encoder(self, *, device: str, dtype: torch.dtype) -> Any:
        config = self.shape.text_encoder
        return random_weights.random_text_encoder(config, device=device, dtype=dtype, seed=_SEED)

    def tokenizer(self) -> Any:
        """The built-in model's: its ids are among the first few hundred of any vocabulary."""
        return AutoTokenizer.from_pretrained(_TOKENIZER, local_files_only=True)


@dataclass(frozen=True)
class CheckpointWeights:
    """folder: a diffusers checkpoint, its weights there."""

    shape: Shape
    folder: Path

    def transformer(self, expert: int, *, device: str, dtype: torch.dtype) -> Any:
        name = "transformer" if expert == 0 else "transformer_2"
        return self._read(WanTransformer3DModel, name, device, dtype=dtype)

    def vae(self, *, device: str) -> Any:
        return self._read(AutoencoderKLWan, "vae", device, dtype=torch.float32)

    def text_encoder(self, *, device: str, dtype: torch.dtype) -> Any:
        return self._read(UMT5EncoderModel, "text_encoder", device, torch_dtype=dtype)

    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder / "tokenizer", local_files_only=True)

    def _read(self, component: Any, name: str, device: str, **dtype: torch.dtype) -> Any:
        folder = self.folder / name
        module = component.from_pretrained(folder, use_safetensors=True, local_files_only=True, **dtype)
        return module.eval().requires_grad_(False).to(device)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """All that a whole clip needs on a device but the VAE, which each side has in a dtype of its own."""

    experts: Sequence[Any]
    text_encoder: Any
    tokenizer: Any


def load_parts(weights: Weights, *, device: str, dtype: torch.dtype) -> Parts:
    return Parts(
        experts=[
            weights.transformer(expert, device=device, dtype=dtype)
            for expert in range(weights.shape.num_experts)
        ],
        text_encoder=weights.text_encoder(device=device, dtype=dtype),
        tokenizer=weights.tokenizer(),
    )
