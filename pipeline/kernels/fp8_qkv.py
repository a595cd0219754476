"""Queries, keys and values of self-attention in e4m3: normed, turned, centred, each within its range.

What all keys have in common adds the same to every score of a query, which softmax does not see; what all
values have in common is in every output. Both are taken off before rounding, which then errs by a part of what
is left. Queries and keys need no look at their size: after their norm no channel can be larger than sqrt(D)
times its weight, and e4m3 loses nothing to a scale that is too large by less than a few hundred.

Shapes: B clips, N tokens, D channels, H heads of K channels (D = H * K), R = K / 2 rotated pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pipeline.kernels import fp8_rows
from pipeline.kernels.fp8_rows import LARGEST, SMALLEST, to_e4m3
from pipeline.kernels.qk_norm_rope import Rope, qk_norm_rope
from pipeline.kernels.rows import row_launch
from pipeline.kernels.triton_jit import jit, tl

# Of the tokens' keys that are averaged: any one vector may be taken off all keys, so a sample is exact as well.
# A prime, so that it does not fall on the same column of every line of a picture.
_KEY_STEP = 13
_TOKENS_PER_PROGRAM = 5 * _KEY_STEP


class Fp8Norms(NamedTuple):
    """Of queries and keys: weights_2D in fp32, over the scale of their head; score_scales_H is both scales' product."""

    weights_2D: torch.Tensor
    score_scales_H: torch.Tensor


class Fp8Qkv(NamedTuple):
    """values_BN3D: e4m3, to be attended with Fp8Norms' scales. The result times v_scales plus v_means is attention's."""

    values_BN3D: torch.Tensor
    v_scales_B1D: torch.Tensor
    v_means_B1D: torch.Tensor
