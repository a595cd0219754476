"""Softmax attention without a mask, by whichever of three libraries the caller names.

Shapes: B clips, N query tokens, M key tokens, H heads of K channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TORCH, CUDNN, FLASH3 = "torch", "cudnn", "flash3"
FLASH3_PACKAGE = "fa3-fwd"

# FlashAttention-3's block of queries, for heads of 65 to 128 channels. Where their number is even two blocks
# read keys and values once between them: on one H200 767 TFLOP/s for 256 blocks (12 heads), 730 for 245 (24),
# in runs of their own. One more block costs its share of them all, so only many are made even.
_FLASH3_BLOCK = 128
_FLASH3_MANY_BLOCKS = 40

_Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attention(
    q_BNHK: torch.Tensor, k_BMHK: torch.Tensor, v_BMHK: torch.Tensor, *, backend: str
) -> torch.Tensor:
    """Every query attends to every key; scores are scaled by K**-0.5. Returns (B, N, H * K).

    Inputs may be strided views, as of one fused projection; their last axis is contiguous.
    """
    return _BACKENDS[backend](q_BNHK, k_BMHK, v_BMHK).flatten(2)


def query_rows(num_queries: int, *, backend: str) -> int:
    """How many rows of queries `attention` is best given; what it makes of those past num_queries is waste.

    Their values do not matter.
    """
    blocks = -(-num_queries // _FLASH3_BLOCK)
    if backend == FLASH3 and blocks % 2 == 1 and blocks > _FLASH3_MANY_BLOCKS:
        return blocks * _FLASH3_BLOCK + 1
    return num_queries


def available_backends(device: str, *, dtype: torch.dtype) -> tuple[str, ...]:
    """Those that run on the device in the dtype. FlashAttention-3 is for Hopper, half precision only."""
    if device == "cpu" or dtype == torch.float32:
        return (TORCH,)
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return (FLASH3, CUDNN, TORCH) if is_hopper and flash3_version() is not None else (CUDNN, TORCH)


def flash3_version() -> str | None:
    """Of the wheel, None where it is not installed."""
    try:
        return version(FLASH3_PACKAGE) if find_spec("fa3_fwd_interface") else None
    except PackageNotFoundError:
        return None


def _torch(q_BNHK: torch.Tensor, k_BMHK: torch.Tensor, v_BMHK: torch.Tensor) -> torch.Tensor:
    q_BHNK, k_BHMK, v_BHMK = (tensor.transpose(1, 2) for tensor in (q_BNHK, k_BMHK, v_BMHK))
    return F.scaled_dot_product_attention(q_BHNK, k_BHMK, v_BHMK).transpose(1, 2)


def _cudnn(q_BNHK: torch.Tensor, k_BMHK: torch.Tensor, v_BMHK: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _torch(q_BNHK, k_BMHK, v_BMHK)


def _flash3(q_BNHK: torch.Tensor, k_BMHK: torch.Tensor, v_BMHK: torch.Tensor) -> torch.Tensor:
    return flash3_forward()(q_BNHK, k_BMHK, v_BMHK, softmax_scale=q_BNHK.shape[-1] ** -0.5, num_splits=1)[0]


@cache
def flash3_forward() -> Callable[..., tuple[torch.Tensor, ...]]:
    # The operator beneath flash_attn_func, whose autograd wrapper costs a launch-bound forward its time.
    from fa3_fwd_interface import _flash_attn_forward

    return _flash_attn_forward


_BACKENDS: dict[str, _Attention] = {TORCH: _torch, CUDNN: _cudnn, FLASH3: _flash3}
