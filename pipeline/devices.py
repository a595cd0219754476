"""The cards of this machine, and what software drives them."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch


def list_devices() -> tuple[str, ...]:
    """("cuda:0", ...) of the visible cards, or ("cpu",). Counting creates no CUDA context."""
    num_cards = torch.cuda.device_count()
    return tuple(f"cuda:{index}" for index in range(num_cards)) or ("cpu",)


def device_name(device: str) -> str:
    """What the maker calls it, such as "NVIDIA H200". Initialises CUDA for a card."""
    return _processor_name() if device == "cpu" else torch.cuda.get_device_name(device)


def device_memory_bytes(device: str) -> int:
    """All of its memory, used or not. Initialises CUDA for a card."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.cuda.get_device_properties(device).total_memory


def let_segments_grow() -> None:
    """What one bucket frees on a card serves the next, of whatever size. Before torch first allocates there.

    A user's own setting is left alone. Not set through the environment: the variable that torch 2.9 reads for
    cards is one that it warns about.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "PYTORCH_ALLOC_CONF" in os.environ:
        return
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        set_settings = torch._C._accelerator_setAllocatorSettings
    else:  # torch before 2.8
        set_settings = torch.cuda.memory._set_allocator_settings
    set_settings("expandable_segments:True")


def versions() -> dict[str, str]:
    """Of the libraries that decide the pixels. `cuda` is "none" in a build of torch without it."""
    packages = {name: version(name) for name in ("torch", "diffusers", "transformers")}
    return packages | {"cuda": torch.version.cuda or "none"}


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
