"""The rate that a column's is compared with: what the card sustains in the plainest of products."""

from __future__ import annotations

import torch

from pipeline.bench.clock import Call

_SIDE = 8192  # 782 TFLOP/s in bf16 on an H200; larger ones are no faster
_SIDE_ON_CPU = 256
_PRODUCTS = 20  # in one call: 28 ms on an H200, far above what an event costs


def make_matmul(*, device: str, dtype: torch.dtype) -> tuple[Call, int]:
    """A call, and its operations. Square matrices of normal values, results into one buffer."""
    side = _SIDE_ON_CPU if device == "cpu" else _SIDE
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    result = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(left, right, out=result)

    return multiply, _PRODUCTS * 2 * side**3
