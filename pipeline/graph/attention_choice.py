"""Which attention library to use: measured once for each card, versions and shape, and then kept.

Libraries round differently, so a choice that changed from run to run would change pixels. What was chosen is
kept in a JSON file and in the numerics version that the ledger records with each clip.

Shapes: B clips, N tokens, H heads of K channels.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from pipeline.devices import device_name
from pipeline.kernels.attention import attention, available_backends, flash3_version, query_rows

Shape = tuple[int, int, int, int]

_WARM_UP, _TIMED = 2, 5


def backend_chooser(*, dtype: torch.dtype, device: str, file: Path) -> Callable[[Shape], str]:
    """choose_backend for one device, which asks the file once for each shape."""
    return functools.cache(functools.partial(choose_backend, dtype=dtype, device=device, file=file))


def choose_backend(shape_BNHK: Shape, *, dtype: torch.dtype, device: str, file: Path) -> str:
    """The quickest backend for self-attention of that shape. file: the choices so far; made when missing."""
    backends = available_backends(device, dtype=dtype)
    if len(backends) == 1:
        return backends[0]
    key = _key(shape_BNHK, dtype, device)
    known = _read(file).get(key)
    if known in backends:
        return known
    times_s = {name: _median_s(name, shape_BNHK, dtype, device) for name in backends}
    best = min(times_s, key=times_s.__getitem__)
    _add(file, key, best)
    return best


def _key(shape_BNHK: Shape, dtype: torch.dtype, device: str) -> str:
    shape = "x".join(map(str, shape_BNHK))
    cudnn = torch.backends.cudnn.version()
    software = f"torch {torch.__version__}, cudnn {cudnn}, flash3 {flash3_version() or 'absent'}"
    return f"{device_name(device)}, {software}, {str(dtype).removeprefix('torch.')} {shape}"


def _median_s(backend: str, shape_BNHK: Shape, dtype: torch.dtype, device: str) -> float:
    """Infinite where the library does not know such heads: each has its own list of channels."""
    clips, tokens, *head = shape_BNHK
    rows = (query_rows(tokens, backend=backend), tokens, tokens)
    qkv = [torch.randn((clips, count, *head), dtype=dtype, device=device) for count in rows]
    times_s = []
    for _ in range(_WARM_UP + _TIMED):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        try:
            attention(*qkv, backend=backend)
        except RuntimeError:
            return math.inf
        end.record()
        end.synchronize()
        times_s.append(start.elapsed_time(end) / 1000)
    return statistics.median(times_s[_WARM_UP:])


def _read(file: Path) -> dict[str, str]:
    try:
        choices = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there yet, or damaged: it is measured again
        return {}
    return choices if isinstance(choices, dict) else {}


def _add(file: Path, key: str, backend: str) -> None:
    """Best effort: a folder that cannot be written costs the next run its measurement, no more."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(_read(file) | {key: backend}, indent=2) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
