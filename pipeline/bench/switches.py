"""Global switches of torch that one side sets and another one does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def with_cudnn(call: Callable[[], T], *, deterministic: bool) -> Callable[[], T]:
    """The engine takes deterministic convolutions only; diffusers' users leave cuDNN its choice."""

    def switched() -> T:
        before = torch.backends.cudnn.deterministic
        torch.backends.cudnn.deterministic = deterministic
        try:
            return call()
        finally:
            torch.backends.cudnn.deterministic = before

    return switched
