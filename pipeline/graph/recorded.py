"""Many small kernels as one launch, for work that is bound by what the CPU can launch, not by the card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensors = tuple[torch.Tensor, ...]

_EAGER_CALLS = 2  # of each set of shapes: compilation, autotuning and cuBLAS's workspaces come with them


@dataclass(kw_only=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    outputs: Tensors


class Recorded:
    """A function of tensors on a card; its kernels are recorded for each set of shapes, and then replayed.

    On one H200 a training step of the built-in model, 1,024 clips at once, goes from 29 to 45 a second.
    The function must launch the same kernels for the same shapes, must not wait for the card, and must draw
    no random numbers. Its outputs hold until the next call. Not enabled, it is called as it is.
    """

    def __init__(self, function: Callable[..., Tensors], *, enabled: bool) -> None:
        self._function = function
        self._enabled = enabled
        self._calls: dict[tuple[torch.Size, ...], int] = {}
        self._inputs: dict[tuple[torch.Size, ...], Tensors] = {}
        self._recordings: dict[tuple[torch.Size, ...], _Recording] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        if not self._enabled:
            return self._function(*inputs)
        shapes = tuple(tensor.shape for tensor in inputs)
        if shapes not in self._inputs:  # before the first call's own temporaries, among which it would lie
            self._inputs[shapes] = tuple(torch.empty_like(tensor) for tensor in inputs)
        for kept, given in zip(self._inputs[shapes], inputs, strict=True):
            kept.copy_(given)
        self._calls[shapes] = self._calls.get(shapes, 0) + 1
        if self._calls[shapes] <= _EAGER_CALLS:
            return self._function(*self._inputs[shapes])
        if shapes not in self._recordings:
            self._recordings[shapes] = self._record(self._inputs[shapes])
        self._recordings[shapes].graph.replay()
        return self._recordings[shapes].outputs

    def _record(self, inputs: Tensors) -> _Recording:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._function(*inputs)
        return _Recording(graph=graph, outputs=outputs)
