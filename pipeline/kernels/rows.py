"""How kernels that need whole rows share them out: a program holds a few rows of one clip in registers.

Shapes: B clips, N tokens, D channels.
"""

from __future__ import annotations

from typing import Any

import torch

# Four loads of 16 bytes in bf16. Rows of 3,072 on one H200, where a plain copy moves 4.1 TB/s: 3.9 by each of
# the kernels; with 16 values a thread 3.1 to 3.5, with 8 2.5 to 3.6. Of 8,192 values a program, 2.0 to 3.9.
_VALUES_PER_THREAD = 32
_VALUES_PER_PROGRAM = 2048  # shorter rows share a program


def row_launch(x_BN: torch.Tensor, *, channels: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid over the tokens and clips of x, and a program's tile for rows of `channels`."""
    clips, tokens = x_BN.shape[:2]
    block = 1 << (channels - 1).bit_length()
    rows = max(1, _VALUES_PER_PROGRAM // block)
    warps = rows * block // (32 * _VALUES_PER_THREAD)
    return (-(-tokens // rows), clips), {"BLOCK_D": block, "ROWS": rows, "num_warps": warps}


def clip_stride(vector: torch.Tensor) -> int:
    """Elements from one clip's channels to the next's in (B, 1, D); 0 where all clips share them."""
    assert vector.stride(-1) == 1
    if vector.numel() == vector.shape[-1]:
        return 0
    assert vector.dim() == 3
    assert vector.shape[1] == 1
    return vector.stride(0)
