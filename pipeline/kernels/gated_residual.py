"""The residual stream takes in a branch's output, through a gate where there is one.

Shapes: B clips, N tokens, D channels.
"""

from __future__ import annotations

import torch

from pipeline.kernels.triton_jit import jit, tl


def gated_residual(x_BND: torch.Tensor, branch_BND: torch.Tensor, *, gate: torch.Tensor) -> torch.Tensor:
    """x + branch * gate, summed in fp32, in x's dtype. gate: fp32, broadcastable to x."""
    return (x_BND.float() + branch_BND.float() * gate).to(x_BND.dtype)


def take_in_(x_BND: torch.Tensor, branch_BND: torch.Tensor, *, gate: torch.Tensor | None) -> None:
    """The sum in x's place. gate: as gated_residual's; none: the branch as it is."""
    x_BND.copy_(x_BND + branch_BND if gate is None else gated_residual(x_BND, branch_BND, gate=gate))


@jit
def taken_in(
    x_ptrs: tl.tensor, branch_ptrs: tl.tensor, gate_ptrs: tl.tensor, inside: tl.tensor, present: tl.tensor
) -> tl.tensor:
    """For kernels: take_in_ of rows of x, in its place and returned, in its dtype.

    gate_ptrs: of fp32 channels, None without a gate. present: the channels that are there. To be launched
    with enable_fp_fusion=False: the product is rounded before the sum, as in plain torch, equal to the bit.
    """
    x = tl.load(x_ptrs, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    branch = tl.load(branch_ptrs, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if gate_ptrs is not None:
        branch = branch * tl.load(gate_ptrs, mask=present, other=0.0).to(tl.float32)
    sums = (x + branch).to(x_ptrs.dtype.element_ty)
    tl.store(x_ptrs, sums, mask=inside)
    return sums
