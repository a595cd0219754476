"""Exact work that need not be done again at every step: the same numbers, computed once.

diffusers recomputes all of this in every forward. Nothing here approximates: a fold changes when something is
computed, or how many times, never what.

Shapes: S steps, L blocks, D channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True, kw_only=True)
class StepTables:
    """What one timestep means to every block and to the head, for all the steps of a schedule, in fp32.

    blocks_SL6D: shift, 1 + scale and gate of self-attention, then of the feed-forward. head_S2D: shift,
    1 + scale.
    """

    blocks_SL6D: torch.Tensor
    head_S2D: torch.Tensor


def fuse_linears(linears: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """One weight and bias for linears that read the same input; theirs become views of it.

    So nothing is held twice, and the module they came from still computes with them.
    """
    weight = torch.cat([linear.weight for linear in linears])
    bias = torch.cat([linear.bias for linear in linears])
    sizes = [linear.out_features for linear in linears]
    for linear, own_weight, own_bias in zip(linears, weight.split(sizes), bias.split(sizes), strict=True):
        linear.weight.data, linear.bias.data = own_weight, own_bias
    return weight, bias


def step_tables(module: Any, tables_L6D: torch.Tensor, timesteps_S: torch.Tensor) -> StepTables:
    """Timestep embedding and modulation of all steps: about 2 MB a step for 30 blocks of 3,072 channels.

    One row a step also stands for Wan2.2-TI2V's table of one row a token, whose rows are all equal in
    text-to-video. module: a WanTransformer3DModel. tables_L6D: its blocks', in fp32. timesteps_S: of any
    dtype, on the module's device.
    """
    embedder = module.condition_embedder
    waves = embedder.timesteps_proj(timesteps_S).to(embedder.time_embedder.linear_1.weight.dtype)
    time_SD = embedder.time_embedder(waves).to(module.patch_embedding.weight.dtype)
    modulation_S16D = embedder.time_proj(F.silu(time_SD)).unflatten(1, (1, 6, -1)).float()
    blocks_SL6D = tables_L6D[None] + modulation_S16D
    blocks_SL6D[:, :, (1, 4)] += 1
    head_S2D = (module.scale_shift_table + time_SD.unsqueeze(1)).float()
    head_S2D[:, 1] += 1
    return StepTables(blocks_SL6D=blocks_SL6D, head_S2D=head_S2D)
