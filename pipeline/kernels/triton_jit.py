"""Triton where it is installed: CUDA builds of torch bring it; others launch no kernels and need none."""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["jit", "tl"]


def jit(kernel: Any) -> Any:
    """triton.jit, or the function as it is."""
    return triton.jit(kernel) if triton else kernel
