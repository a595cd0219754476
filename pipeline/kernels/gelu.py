"""The activation between the two linears of a feed-forward layer, alone and with the linear before it.

Shapes: B clips, N tokens, D channels, F channels of the layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form, in x's dtype."""
    return F.gelu(x, approximate="tanh")


def linear_gelu(x_BND: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor) -> torch.Tensor:
    """gelu of a linear layer as (B, N, F), without a backward. All contiguous, of one dtype.

    On a card the matmul of 16-bit types activates before it rounds: moves B * N * (D + F) values and weights.
    """
    return _linear_gelu_op(x_BND, weight_FD, bias_F)


def plain_linear_gelu(x_BND: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor) -> torch.Tensor:
    return gelu(F.linear(x_BND, weight_FD, bias_F))


def cuda_linear_gelu(x_BND: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor) -> torch.Tensor:
    if x_BND.dtype == torch.float32:  # cuBLAS does not say how exact its tanh is
        return plain_linear_gelu(x_BND, weight_FD, bias_F)
    # In torch's CUDA code this is always the tanh form, fused or not. On the CPU it is the one with erf.
    out = torch._addmm_activation(bias_F, x_BND.flatten(0, 1), weight_FD.t(), use_gelu=True)
    return out.unflatten(0, x_BND.shape[:2])


_linear_gelu_op = torch.library.custom_op(
    "vgbatch::linear_gelu", cuda_linear_gelu, mutates_args=(), device_types="cuda"
)
_linear_gelu_op.register_kernel("cpu", plain_linear_gelu)


@_linear_gelu_op.register_fake
def _activations(x_BND: torch.Tensor, weight_FD: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x_BND.new_empty(*x_BND.shape[:2], weight_FD.shape[0])
