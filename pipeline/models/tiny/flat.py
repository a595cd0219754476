"""All parameters of a model in one flat fp32 tensor: one kernel casts, averages or updates all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from manifests.errors import UsageError

Weights = Mapping[str, torch.Tensor]


_ALIGNMENT = 64  # elements: kernels want their operands to begin on 16 bytes at least


class Layout:
    """Where each named tensor lies in a flat one: in order, with unused elements up to the alignment."""

    def __init__(self, weights: Weights) -> None:
        self.shapes = {name: tensor.shape for name, tensor in weights.items()}
        self._sizes: list[int] = []
        for shape in self.shapes.values():
            self._sizes += [shape.numel(), -shape.numel() % _ALIGNMENT]

    def flatten(self, weights: Weights, *, device: str) -> torch.Tensor:
        """A new fp32 tensor, zero where unused. Raises KeyError where a name is missing."""
        flat = torch.zeros(sum(self._sizes), device=device)
        with torch.no_grad():
            for name, view in self.split(flat).items():
                view.copy_(weights[name])
        return flat

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views by name; gradients go back to the flat tensor in one piece."""
        parts = flat.split(self._sizes)[::2]
        return {
            name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def require_shapes(weights: Weights, shapes: Mapping[str, torch.Size]) -> None:
    """Raises UsageError where a network of other sizes left these weights."""
    if {name: tensor.shape for name, tensor in weights.items()} != shapes:
        raise UsageError(
            "the state is of networks of other sizes",
            hint="the real ones and those of `--toy` need folders of their own",
        )


def part_of(weights: Weights, prefix: str) -> dict[str, torch.Tensor]:
    """The weights whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def prefixed(weights: Weights, prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in weights.items()}
