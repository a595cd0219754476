"""Clips for the denoiser: latents encoded once and kept on the card, each with several captions.

Shapes: M clips, N tokens of P numbers, C captions of L text tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.models.tiny import whole_clip
from pipeline.models.tiny.denoiser import patchify
from pipeline.models.tiny.described import Described, Order, draw_all
from pipeline.models.tiny.flat import Weights
from pipeline.models.tiny.render import render

_ENCODED_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class Size:
    """A picture size and how many clips of it to have at most."""

    width: int
    height: int
    num_clips: int


@dataclass(frozen=True, kw_only=True)
class Bank:
    """Clips of one size on the device. height, width: of the latents."""

    patches_MNP: torch.Tensor
    ids_MCL: torch.Tensor
    lengths_MC: torch.Tensor
    frames: int
    height: int
    width: int

    def __len__(self) -> int:
        return len(self.ids_MCL)


@dataclass(frozen=True, kw_only=True)
class LatentCode:
    """A trained VAE as the banks use it: its weights, and the latents' mean and deviation."""

    weights: Weights
    mean: torch.Tensor
    std: torch.Tensor

    def encode(self, video_BTHW3: torch.Tensor) -> torch.Tensor:
        """RGB in [0, 1] to normalised latents, (B, T, H, W, Z)."""
        dtype = self.weights["quant_conv.weight"].dtype
        posterior = whole_clip.encode(self.weights, (video_BTHW3 * 2 - 1).to(dtype))
        return (posterior.chunk(2, dim=-1)[0].float() - self.mean) / self.std


def fill_banks(
    sizes: Sequence[Size],
    code: LatentCode,
    *,
    seed: int,
    tokenizer: Path,
    num_captions: int,
    clips_per_order: int,
    device: str,
    is_late: Callable[[], bool],
) -> list[Bank]:
    """One bank for each size. When it gets late the banks stay smaller, all in the same proportion."""
    orders = [
        Order(
            seed=seed,
            number=number,
            num_scenes=min(clips_per_order, size.num_clips),
            width=size.width,
            height=size.height,
            num_captions=num_captions,
            tokenizer=tokenizer,
        )
        for size in sizes
        for number in range(max(1, size.num_clips // clips_per_order))
    ]
    first = [order for order in orders if order.number == 0]
    rest = [order for order in orders if order.number > 0]
    random.Random(seed).shuffle(rest)
    filled: dict[tuple[int, int], list[tuple[torch.Tensor, Described]]] = {}
    for described in draw_all(first + rest):
        size_of = (described.scenes.width, described.scenes.height)
        filled.setdefault(size_of, []).append((_encoded(described, code, device), described))
        if is_late() and len(filled) == len(sizes):
            break
    return [_joined(filled[size.width, size.height], size, device) for size in sizes]


@torch.no_grad()
def _encoded(described: Described, code: LatentCode, device: str) -> torch.Tensor:
    video = render(described.scenes, device=device)
    latents = torch.cat([code.encode(clips) for clips in video.split(_ENCODED_AT_ONCE)])
    return patchify(latents).to(torch.float32 if device == "cpu" else torch.bfloat16)


def _joined(parts: list[tuple[torch.Tensor, Described]], size: Size, device: str) -> Bank:
    patches_MNP = torch.cat([patches for patches, _ in parts])
    ids, lengths = (
        torch.cat([torch.from_numpy(getattr(described, name)) for _, described in parts]).to(device)
        for name in ("ids", "lengths")
    )
    height, width = size.height // 8, size.width // 8
    return Bank(
        patches_MNP=patches_MNP,
        ids_MCL=ids,
        lengths_MC=lengths,
        frames=patches_MNP.shape[1] * 4 // (height * width),
        height=height,
        width=width,
    )
