"""A transformer whose large products are of 8-bit floats (e4m3), at nearly twice the rate of bfloat16.

In a block these are self-attention with its four projections and both linears of the feed-forward layer, nine
tenths of the arithmetic at 31,248 tokens. Rows are quantised by the op before a product (a norm, GELU,
attention), weights once. All else stays as it is: embedders, modulation, the first and the last projection,
the residual stream and its norms, and cross-attention, which decides what is shown at little cost.

On a CPU the same values are rounded to e4m3 and multiplied in fp32, which shows what it costs in quality, not
what it gains in time.

Shapes: B clips, N tokens, D channels, H heads of K channels, I and O channels in and out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from pipeline.kernels.affine_norm_fp8 import affine_norm_fp8
from pipeline.kernels.attention import flash3_version
from pipeline.kernels.fp8_attention import fp8_attention
from pipeline.kernels.fp8_linear import fp8_linear, fp8_weight
from pipeline.kernels.fp8_qkv import fp8_norms, fp8_qkv
from pipeline.kernels.fp8_rows import Fp8Rows, fp8_rows
from pipeline.kernels.gated_residual_norm_fp8 import gated_residual_norm_fp8
from pipeline.kernels.gelu_fp8 import gelu_fp8
from pipeline.models.wan_block import (
    Attending,
    Form,
    Linear,
    Mixing,
    PlainFeedForward,
    PlainSelfAttention,
    WanBlock,
)
from pipeline.models.wan_transformer import Convert

# Numbers of blocks that stay in the stream's dtype. The built-in model needs none: with all in 8 bits its
# clips are 36.7 dB from exact ones of the same noise, the median of 60, and as many show what was asked for.
# Keeping its last block changed neither.
KEPT_BLOCKS: frozenset[int] = frozenset()

FP8 = Form(norm=affine_norm_fp8, residual_norm=gated_residual_norm_fp8)  # Fp8Rows

_MULTIPLE = 16  # of channels, for tensor cores
_LEAST_CAPABILITY = (8, 9)
_HOPPER = 9


@dataclass(frozen=True, kw_only=True)
class Fp8Linear:
    """weight: (O, I) in e4m3, scales: (1, O) of its rows."""

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor

    def __call__(self, rows: Fp8Rows) -> torch.Tensor:
        return fp8_linear(rows, weight=self.weight, scales=self.scales, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class PlainMixing:
    """Attention in the stream's dtype, its result in rows for the next product."""

    plain: Mixing

    def __call__(self, qkv_BN3D: torch.Tensor, attending: Attending) -> Fp8Rows:
        return fp8_rows(self.plain(qkv_BN3D, attending, num_tokens=qkv_BN3D.shape[1]))


@dataclass(frozen=True, kw_only=True)
class Fp8Mixing:
    """The same in e4m3, for which there is one library. weights, score_scales: of fp8_norms.

    sparse: in place of it, where attention is, as no library has that in e4m3.
    """

    num_heads: int
    eps: float
    weights_2D: torch.Tensor
    score_scales_H: torch.Tensor
    sparse: PlainMixing

    def __call__(self, qkv_BN3D: torch.Tensor, attending: Attending) -> Fp8Rows:
        if attending.sparse is not None:
            return self.sparse(qkv_BN3D, attending)
        qkv = fp8_qkv(
            qkv_BN3D,
            weights_2D=self.weights_2D,
            eps=self.eps,
            num_heads=self.num_heads,
            rope=attending.rope,
        )
        mixed_BND = fp8_attention(qkv.values_BN3D, score_scales=self.score_scales_H)
        return fp8_rows(mixed_BND, weight=qkv.v_scales_B1D, bias=qkv.v_means_B1D)


@dataclass(frozen=True, kw_only=True)
class Fp8SelfAttention:
    """A SelfAttention."""

    form: ClassVar[Form] = FP8

    qkv: Fp8Linear
    mixing: PlainMixing | Fp8Mixing
    out: Fp8Linear

    def __call__(self, normed: list[Any], attending: Attending) -> torch.Tensor:
        return self.out(self.mixing(self.qkv(normed.pop(0)), attending))


@dataclass(frozen=True, kw_only=True)
class Fp8FeedForward:
    """A FeedForward."""

    form: ClassVar[Form] = FP8

    up: Fp8Linear
    down: Fp8Linear

    def __call__(self, normed: list[Any]) -> torch.Tensor:
        return self.down(gelu_fp8(self.up(normed.pop(0))))


@dataclass(frozen=True, kw_only=True)
class Fp8Support:
    """What a device computes in e4m3, and why not all of it."""

    linears: bool
    attention: bool
    reason: str = ""

    def __str__(self) -> str:
        """In one line, what becomes of the preset there."""
        if not self.linears:
            return f"nothing is in 8 bits: {self.reason}"
        if not self.attention:
            return f"linears are in 8 bits, self-attention is not: {self.reason}"
        return "linears and self-attention are in 8 bits" + (f": {self.reason}" if self.reason else "")


def fp8_support(device: str, *, dtype: torch.dtype) -> Fp8Support:
    """dtype: of the transformer. Initialises CUDA for a card."""
    if device == "cpu":
        return Fp8Support(linears=True, attention=True, reason="emulated, by rounding what fp32 multiplies")
    if dtype != torch.bfloat16:
        return Fp8Support(linears=False, attention=False, reason=f"{dtype} was asked for, not torch.bfloat16")
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        least, own = (".".join(map(str, numbers)) for numbers in (_LEAST_CAPABILITY, capability))
        reason = f"the card's compute capability is {own}, {least} has it"
        return Fp8Support(linears=False, attention=False, reason=reason)
    if capability[0] != _HOPPER:
        return Fp8Support(linears=True, attention=False, reason="FlashAttention-3 is for Hopper cards")
    if flash3_version() is None:
        reason = "FlashAttention-3 is missing, `pip install 'vgbatch[hopper]'` brings it"
        return Fp8Support(linears=True, attention=False, reason=reason)
    return Fp8Support(linears=True, attention=True)


def fp8_convert(support: Fp8Support, *, kept: frozenset[int] = KEPT_BLOCKS) -> Convert | None:
    """For a WanTransformer; None where its blocks stay as they are. kept: numbers of those that do anyway."""
    if not support.linears:
        return None

    def convert(number: int, block: WanBlock) -> WanBlock:
        return block if number in kept else fp8_block(block, with_attention=support.attention)

    return convert


def fp8_block(block: WanBlock, *, with_attention: bool = True) -> WanBlock:
    """A plain block in 8 bits, or itself where tensor cores cannot take its sizes."""
    own, feed_forward = block.self_attention, block.feed_forward
    assert isinstance(own, PlainSelfAttention)
    assert isinstance(feed_forward, PlainFeedForward)
    hidden, channels = feed_forward.up.weight.shape
    if any(size % _MULTIPLE for size in (hidden, channels // own.mixing.num_heads)):
        return block
    mixing = _fp8_mixing(own.mixing) if with_attention else PlainMixing(plain=own.mixing)
    return replace(
        block,
        self_attention=Fp8SelfAttention(qkv=_quantised(own.qkv), mixing=mixing, out=_quantised(own.out)),
        feed_forward=Fp8FeedForward(up=_quantised(feed_forward.up), down=_quantised(feed_forward.down)),
    )


def _quantised(linear: Linear) -> Fp8Linear:
    weight, scales = fp8_weight(linear.weight)
    return Fp8Linear(weight=weight, scales=scales, bias=linear.bias)


def _fp8_mixing(plain: Mixing) -> Fp8Mixing:
    norms = fp8_norms(plain.q_norm, plain.k_norm, num_heads=plain.num_heads)
    return Fp8Mixing(
        num_heads=plain.num_heads, eps=plain.eps, sparse=PlainMixing(plain=plain), **norms._asdict()
    )
