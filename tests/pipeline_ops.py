"""What the tests of ops share: inputs, and the bound on an op's error.

The bound: an error of at most twice plain torch's at the same dtype, plus 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

EPS = 1e-6


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Drawn on the CPU: the same on every device."""
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


def assert_close(
    ours: torch.Tensor, plain: Callable[..., torch.Tensor], *inputs: torch.Tensor, dtype: torch.dtype
) -> None:
    """plain: the formula in torch, run at float64 for the truth and at dtype for the yardstick."""
    assert ours.dtype == dtype
    truth = plain(*(tensor.double() for tensor in inputs))
    yardstick = plain(*(tensor.to(dtype) for tensor in inputs))
    error, allowed = (ours - truth).abs().max(), (yardstick - truth).abs().max()
    assert ours.shape == truth.shape
    assert error <= 2 * allowed + 1e-6


def rms_normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x_BNHK: torch.Tensor, angle_NR: torch.Tensor) -> torch.Tensor:
    """Each pair of neighbouring channels turned by its token's angle."""
    first, second = x_BNHK.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle_NR.cos()[:, None], angle_NR.sin()[:, None]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
