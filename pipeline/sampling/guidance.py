"""Classifier-free guidance (Ho and Salimans 2022, equation 6, as diffusers scales it)."""

from __future__ import annotations

import torch


def uses_guidance(guidance_scale: float) -> bool:
    """Whether a clip is guided at all: the first scale decides for both experts, as in diffusers."""
    return guidance_scale > 1.0


def guided(conditional: torch.Tensor, unconditional: torch.Tensor, *, scale: float) -> torch.Tensor:
    """From what the negative prompt gives towards, and past, what the prompt gives."""
    return unconditional + scale * (conditional - unconditional)
