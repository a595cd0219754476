"""An encoded prompt as bytes, and what its numbers depend on.

Shapes: L text tokens, E channels of the text encoder.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.metadata import version

import torch
from safetensors.torch import load, save

from pipeline.models.text import MAX_TOKENS

# Changes whenever prompts are cleaned, padded or kept in another way.
_ENCODING = 1
_PACKAGES = ("ftfy", "sentencepiece", "tokenizers", "torch", "transformers")


def encoder_revision(model_revision: str, *, dtype: str, device_name: str) -> str:
    """32 hex digits that differ wherever encoding anew could give other bits than what was kept."""
    packages = [f"{name} {version(name)}" for name in _PACKAGES]
    facts = [str(_ENCODING), str(MAX_TOKENS), model_revision, dtype, device_name, *packages]
    return sha256("\n".join(facts).encode()).hexdigest()[:32]


def to_bytes(states_LE: torch.Tensor) -> bytes:
    """A safetensors file, with a checksum as nothing is forced to the disk. states_LE: on the CPU."""
    return save({"states": states_LE.contiguous(), "sha256": _checksum(states_LE)})


def from_bytes(content: bytes) -> torch.Tensor | None:
    """The (L, E) that were kept, or None when they are not what was kept."""
    try:
        tensors = load(content)
        states_LE = tensors["states"]
        is_whole = torch.equal(tensors["sha256"], _checksum(states_LE))
    except Exception:  # a damaged file may raise anything
        return None
    return states_LE if is_whole else None


def _checksum(states_LE: torch.Tensor) -> torch.Tensor:
    digest = sha256(f"{states_LE.dtype} {tuple(states_LE.shape)}".encode())
    digest.update(states_LE.contiguous().view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
