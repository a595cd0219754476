"""One block of Wan's transformer over a diffusers block's weights: one kernel between two matrix products.

The residual stream is updated in place. A block is entered with the stream and its first norm already taken,
and left the same way for the next block: that norm is fused with the residual that comes before it.

Shapes: B clips, N tokens, R rows of queries, M rows of text, D channels, H heads of K channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from pipeline.graph.fold import fuse_linears
from pipeline.kernels.affine_norm import fused_affine_norm
from pipeline.kernels.attention import attention, query_rows
from pipeline.kernels.gated_residual import take_in_
from pipeline.kernels.gated_residual_norm import gated_residual_norm
from pipeline.kernels.gelu import linear_gelu
from pipeline.kernels.qk_norm_rope import Rope, qk_norm, qk_norm_rope_
from pipeline.kernels.text_attention import text_attention
from pipeline.models.protocol import SparseAttention


@dataclass(frozen=True, kw_only=True)
class TextKeys:
    """Cross-attention keys and values of one block, (B, M, H, K), of which row b uses the first counts_B[b].

    The rows after them are padding, all equal: attention sees one, weighed as all of them.
    """

    k_BMHK: torch.Tensor
    v_BMHK: torch.Tensor
    counts_B: torch.Tensor

    @classmethod
    def room_for(cls, text_BMD: torch.Tensor, *, num_heads: int) -> TextKeys:
        """Not filled yet."""
        k_BMHK, v_BMHK = (torch.empty_like(text_BMD).unflatten(-1, (num_heads, -1)) for _ in range(2))
        counts_B = torch.empty(len(text_BMD), dtype=torch.int32, device=text_BMD.device)
        return cls(k_BMHK=k_BMHK, v_BMHK=v_BMHK, counts_B=counts_B)

    def copy_(self, other: TextKeys) -> None:
        """Take over another prompt's, in place."""
        for own, given in (
            (self.k_BMHK, other.k_BMHK),
            (self.v_BMHK, other.v_BMHK),
            (self.counts_B, other.counts_B),
        ):
            own.copy_(given)


class Form(NamedTuple):
    """How the residual stream is handed over under a norm: by that alone, or with the residual before it."""

    norm: Callable[..., Any]
    residual_norm: Callable[..., Any]


PLAIN = Form(norm=fused_affine_norm, residual_norm=gated_residual_norm)  # (B, N, D) in the stream's dtype


@dataclass(frozen=True, kw_only=True)
class Norm:
    """What follows a layer norm, in fp32: a weight and a bias, each broadcastable to (B, N, D).

    form: in which whatever reads its result takes it.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    form: Form = PLAIN

    def of(self, x_BND: torch.Tensor, *, eps: float) -> Any:
        return self.form.norm(x_BND, weight=self.weight, bias=self.bias, eps=eps)

    def after(
        self, x_BND: torch.Tensor, branch_BND: torch.Tensor, *, gate: torch.Tensor | None, eps: float
    ) -> Any:
        """Of x once it has taken in the branch through the gate, which it does in place."""
        return self.form.residual_norm(
            x_BND, branch_BND, gate=gate, weight=self.weight, bias=self.bias, eps=eps
        )


@dataclass(frozen=True, kw_only=True)
class Linear:
    """weight: (out, in)."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, x_BNI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_BNI, self.weight, self.bias)

    def with_room(self, x_BNI: torch.Tensor, *, num_rows: int) -> torch.Tensor:
        """(B, num_rows, out): rows of zeros behind the result of a single clip; more have no room for any."""
        clips, tokens, _ = x_BNI.shape
        if num_rows == tokens:
            return self(x_BNI)
        assert clips == 1, x_BNI.shape
        out_1RO = x_BNI.new_empty(1, num_rows, len(self.weight))
        torch.addmm(self.bias, x_BNI[0], self.weight.t(), out=out_1RO[0, :tokens])
        out_1RO[:, tokens:].zero_()
        return out_1RO


@dataclass(frozen=True, kw_only=True)
class Attending:
    """How tokens attend to each other. sparse: in place of all to all, for which backend is the library."""

    rope: Rope
    backend: str
    sparse: SparseAttention | None = None

    def query_rows(self, num_clips: int, num_tokens: int) -> int:
        """How many rows of queries a clip is best given."""
        if num_clips > 1 or self.sparse is not None:
            return num_tokens
        return query_rows(num_tokens, backend=self.backend)


class SelfAttention(Protocol):
    form: ClassVar[Form]  # of its input

    def __call__(self, normed: list[Any], attending: Attending) -> torch.Tensor:
        """The branch's output (B, N, D). normed: as in WanBlock.attend."""


class FeedForward(Protocol):
    form: ClassVar[Form]  # of its input

    def __call__(self, normed: list[Any]) -> torch.Tensor:
        """The branch's output (B, N, D). normed: as in WanBlock.attend."""


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """What stands between the projections of self-attention, in the stream's dtype."""

    num_heads: int
    eps: float
    q_norm: torch.Tensor
    k_norm: torch.Tensor

    def __call__(self, qkv_BR3D: torch.Tensor, attending: Attending, *, num_tokens: int) -> torch.Tensor:
        """(B, N, D). qkv: the three projections as one, normed in place.

        Rows past the tokens, where there are any, are for queries alone.
        """
        qkv_BN3D = qkv_BR3D[:, :num_tokens]
        qk_norm_rope_(
            qkv_BN3D,
            q_weight=self.q_norm,
            k_weight=self.k_norm,
            eps=self.eps,
            num_heads=self.num_heads,
            rope=attending.rope,
        )
        q_BRHK = qkv_BR3D.unflatten(-1, (3, self.num_heads, -1))[:, :, 0]
        _, k_BNHK, v_BNHK = qkv_BN3D.unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        if attending.sparse is not None:
            return attending.sparse(q_BRHK, k_BNHK, v_BNHK)
        return attention(q_BRHK, k_BNHK, v_BNHK, backend=attending.backend)[:, :num_tokens]


@dataclass(frozen=True, kw_only=True)
class PlainSelfAttention:
    """A SelfAttention in the stream's dtype. qkv: the three projections as one."""

    form: ClassVar[Form] = PLAIN

    qkv: Linear
    mixing: Mixing
    out: Linear

    def __call__(self, normed: list[Any], attending: Attending) -> torch.Tensor:
        normed_BND = normed.pop(0)
        clips, num_tokens, _ = normed_BND.shape
        qkv_BR3D = self.qkv.with_room(normed_BND, num_rows=attending.query_rows(clips, num_tokens))
        del normed_BND
        return self.out(self.mixing(qkv_BR3D, attending, num_tokens=num_tokens))


@dataclass(frozen=True, kw_only=True)
class PlainFeedForward:
    """A FeedForward in the stream's dtype."""

    form: ClassVar[Form] = PLAIN

    up: Linear
    down: Linear

    def __call__(self, normed: list[Any]) -> torch.Tensor:
        return self.down(linear_gelu(normed.pop(0), self.up.weight, self.up.bias))


@dataclass(frozen=True, kw_only=True)
class WanBlock:
    """What a block computes with. text_norm: None in checkpoints without one before cross-attention."""

    num_heads: int
    eps: float
    self_attention: SelfAttention
    text_norm: Norm | None
    text_q: Linear
    text_q_norm: torch.Tensor
    text_k: Linear
    text_k_norm: torch.Tensor
    text_v: Linear
    text_out: Linear
    feed_forward: FeedForward

    def text_keys(self, text_BMD: torch.Tensor, counts_B: torch.Tensor) -> TextKeys:
        """text_BMD: embedded; all rows past each count equal."""
        k_BMHK = qk_norm(
            self.text_k(text_BMD), weight=self.text_k_norm, eps=self.eps, num_heads=self.num_heads
        )
        v_BMHK = self.text_v(text_BMD).unflatten(-1, (self.num_heads, -1))
        return TextKeys(k_BMHK=k_BMHK, v_BMHK=v_BMHK, counts_B=counts_B)

    def attend(
        self, x_BND: torch.Tensor, normed: list[Any], table_6D: torch.Tensor, attending: Attending
    ) -> torch.Tensor:
        """Self-attention into x, in place; returns what cross-attention's query is projected from.

        normed: the first is x under its norm. It is taken out, so that its room is free once it is read.
        """
        branch_BND = self.self_attention(normed, attending)
        return self._residual(x_BND, branch_BND, gate=table_6D[2], norm=self.text_norm)

    def finish(
        self,
        x_BND: torch.Tensor,
        normed: list[Any],
        table_6D: torch.Tensor,
        text: TextKeys,
        next_norm: Norm,
    ) -> Any:
        """Cross-attention and feed-forward into x, in place; returns x under the norm of whatever is next.

        normed: as in attend.
        """
        mixed_BND = text_attention(
            self.text_q(normed.pop(0)),
            text.k_BMHK,
            text.v_BMHK,
            text.counts_B,
            q_weight=self.text_q_norm,
            eps=self.eps,
        )
        norm = Norm(weight=table_6D[4], bias=table_6D[3], form=self.feed_forward.form)
        inner = [self._residual(x_BND, self.text_out(mixed_BND), gate=None, norm=norm)]
        return self._residual(x_BND, self.feed_forward(inner), gate=table_6D[5], norm=next_norm)

    def _residual(
        self, x_BND: torch.Tensor, branch_BND: torch.Tensor, *, gate: torch.Tensor | None, norm: Norm | None
    ) -> Any:
        if norm is None:
            take_in_(x_BND, branch_BND, gate=gate)
            return x_BND.clone()
        return norm.after(x_BND, branch_BND, gate=gate, eps=self.eps)


def wan_block(module: Any, *, num_heads: int, eps: float) -> WanBlock:
    """Over a diffusers WanTransformerBlock's own weights; its self-attention projections become one."""
    own, text = module.attn1, module.attn2
    activation, _, down = module.ffn.net
    qkv_weight, qkv_bias = fuse_linears([own.to_q, own.to_k, own.to_v])
    return WanBlock(
        num_heads=num_heads,
        eps=eps,
        self_attention=PlainSelfAttention(
            qkv=Linear(weight=qkv_weight, bias=qkv_bias),
            mixing=Mixing(num_heads=num_heads, eps=eps, q_norm=own.norm_q.weight, k_norm=own.norm_k.weight),
            out=_linear(own.to_out[0]),
        ),
        text_norm=_text_norm(module.norm2),
        text_q=_linear(text.to_q),
        text_q_norm=text.norm_q.weight,
        text_k=_linear(text.to_k),
        text_k_norm=text.norm_k.weight,
        text_v=_linear(text.to_v),
        text_out=_linear(text.to_out[0]),
        feed_forward=PlainFeedForward(up=_linear(activation.proj), down=_linear(down)),
    )


def first_norm(table_6D: torch.Tensor, form: Form) -> Norm:
    """Of a block's self-attention, in the form it takes."""
    return Norm(weight=table_6D[1], bias=table_6D[0], form=form)


def _linear(module: Any) -> Linear:
    return Linear(weight=module.weight, bias=module.bias)


def _text_norm(norm: Any) -> Norm | None:
    if isinstance(norm, torch.nn.Identity):
        return None
    return Norm(weight=norm.weight.float(), bias=norm.bias.float())
