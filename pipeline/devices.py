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
