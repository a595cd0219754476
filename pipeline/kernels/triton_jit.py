"""Triton where it is installed: CUDA builds of torch bring it; others launch no kernels and need none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None
try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before 3.4 there is none
    TensorDescriptor = None

__all__ = ["Compiled", "TensorDescriptor", "compiled", "jit", "tl"]


@dataclass(frozen=True)
class Compiled:
    """Kernels of this process so far, those that Triton found in its cache on disk included."""

    num_kernels: int = 0
    seconds: float = 0.0

    def __sub__(self, earlier: Compiled) -> Compiled:
        return Compiled(self.num_kernels - earlier.num_kernels, self.seconds - earlier.seconds)


_compiled = Compiled()


def jit(kernel: Any) -> Any:
    """triton.jit, or the function as it is."""
    return triton.jit(kernel) if triton else kernel


def compiled() -> Compiled:
    return _compiled


def _note(*, times: Any, **_: Any) -> None:
    """Triton's compilation listener. times: a CompileTimes, in microseconds."""
    global _compiled
    _compiled = Compiled(_compiled.num_kernels + 1, _compiled.seconds + times.total / 1e6)


if triton and hasattr(triton, "knobs"):  # before 3.4 nobody can listen
    triton.knobs.compilation.listener = _note
