"""Whether a model's transformers stay on a card, or stream through it from host memory. No torch here."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

# Of a card's memory may be the weights of transformers, all experts together. The rest is for what a clip
# needs: 2 GB at 31,000 tokens of 3,072 channels, and 7 for its decoding.
RESIDENT_FRAC = 0.6


def transformer_bytes(config: Mapping[str, Any], *, num_experts: int, bytes_per_weight: int = 2) -> int:
    """Of the blocks of Wan's transformers, which are all but a hundredth of their weights.

    config: as in a checkpoint's transformer/config.json. bytes_per_weight: as computed with, not as stored.
    Per block: two attentions of four square projections, and a feed-forward layer.
    """
    channels = config["num_attention_heads"] * config["attention_head_dim"]
    per_block = 8 * channels**2 + 2 * channels * config["ffn_dim"]
    return num_experts * config["num_layers"] * per_block * bytes_per_weight


def is_streamed(weight_bytes: int, *, card_bytes: int) -> bool:
    """weight_bytes: as transformer_bytes counts them. card_bytes: all of a card's memory."""
    return weight_bytes > RESIDENT_FRAC * card_bytes


def smallest_card_bytes() -> int | None:
    """The memory of the smallest visible card, used or not; None without a card.

    Asked of the driver: importing torch would slow down a plan, and take memory on every card.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    sizes = [_card_bytes(cuda, number) for number in range(count.value)]
    return min((size for size in sizes if size is not None), default=None)


def _card_bytes(cuda: Any, number: int) -> int | None:
    device, size = ctypes.c_int(), ctypes.c_size_t()
    if cuda.cuDeviceGet(ctypes.byref(device), number) != 0:
        return None
    return size.value if cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device) == 0 else None
