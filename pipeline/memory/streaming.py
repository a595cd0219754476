"""Layers that wait in pinned host memory, for a model whose weights do not fit on the card.

While one layer computes, the next one's weights are on their way: an H200 takes in 50 GB/s, so a block of
Wan 14B (0.7 GB) arrives in 14 ms, and computes for 60 where a clip has 32,760 tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

Layer = TypeVar("Layer")


class StreamedLayers(Sequence[Layer]):
    """Layers of equal shapes, dataclasses of tensors; iterating yields each on the device, in turn.

    A yielded layer holds until the next one is asked for. Two of them fit on the device at any time.
    """

    def __init__(self, layers: Sequence[Layer], *, device: str) -> None:
        self._on_card = device != "cpu"
        self._host = [map_tensors(layer, self._waiting) for layer in layers]
        self._slots = [
            map_tensors(layers[0], lambda tensor: torch.empty_like(tensor, device=device)) for _ in range(2)
        ]
        if self._on_card:
            self._copying = torch.cuda.Stream(device)
            self._arrived = [torch.cuda.Event() for _ in self._slots]

    def __len__(self) -> int:
        return len(self._host)

    def __getitem__(self, index: Any) -> Any:
        """On the host. Raises IndexError."""
        return self._host[index]

    def __iter__(self) -> Iterator[Layer]:
        self._send(0)
        for index in range(len(self)):
            if index + 1 < len(self):
                self._send(index + 1)
            if self._on_card:
                torch.cuda.current_stream().wait_event(self._arrived[index % 2])
            yield self._slots[index % 2]

    def _send(self, index: int) -> None:
        """Into the slot of the layer before the last, whose computation is queued by now."""
        slot, host = self._slots[index % 2], self._host[index]
        if not self._on_card:
            _copy(host, slot)
            return
        self._copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copying):
            _copy(host, slot)
            self._arrived[index % 2].record()

    def _waiting(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu().pin_memory() if self._on_card else tensor.clone()


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same dataclass with every tensor in it, or in dataclasses in it, put through the function."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    changed = {
        field.name: map_tensors(getattr(value, field.name), function) for field in dataclasses.fields(value)
    }
    return dataclasses.replace(value, **changed)


def _copy(source: Any, target: Any) -> None:
    for field in dataclasses.fields(source):
        given, own = getattr(source, field.name), getattr(target, field.name)
        if isinstance(given, torch.Tensor):
            own.copy_(given, non_blocking=True)
        elif dataclasses.is_dataclass(given):
            _copy(given, own)
