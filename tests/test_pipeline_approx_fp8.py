"""A forward in 8 bits is as far from float64 as rounding must bring it; the rest of it stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from pipeline.approx import fp8
from pipeline.approx.fp8 import Fp8FeedForward, Fp8SelfAttention, Fp8Support, fp8_convert, fp8_support
from pipeline.memory.streaming import map_tensors
from pipeline.models.wan_block import Linear, PlainFeedForward, PlainSelfAttention
from pipeline.models.wan_transformer import WanTransformer
from tests.test_pipeline_wan_transformer import forward, inputs, theirs
from tests.test_pipeline_wan_transformer import make_module as make_odd_module

BOTH = Fp8Support(linears=True, attention=True)
LINEARS = Fp8Support(linears=True, attention=False)
ROUNDED = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")


def make_module(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(11)
    module = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=160,
        num_layers=3,
        rope_max_seq_len=32,
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module.to(dtype).eval().requires_grad_(False)


def in_eight_bits(support: Fp8Support = BOTH, **settings: Any) -> WanTransformer:
    return WanTransformer(make_module(), convert=fp8_convert(support), **settings)


def with_rounded_linears(module: Any) -> Any:
    """The oracle: diffusers' own forward, in which the same linears round their rows and weights."""
    for block in module.blocks:
        for part in (block.attn1, block.ffn):
            for name, linear in part.named_modules():
                if name in ROUNDED:
                    linear.weight.copy_(rounded(linear.weight))
                    linear.register_forward_pre_hook(lambda _, given: (rounded(given[0]), *given[1:]))
    return module


def rounded(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).float().to(torch.float8_e4m3fn).to(x.dtype) * scale


@pytest.fixture(scope="module")
def truth() -> torch.Tensor:
    return theirs(make_module(torch.float64))


@pytest.fixture(scope="module")
def rounded_alone() -> torch.Tensor:
    """What rounding linears makes of it, and nothing else, in float64."""
    return theirs(with_rounded_linears(make_module(torch.float64)))


def test_with_8_bit_linears_a_forward_is_the_one_whose_linears_were_rounded(
    truth: torch.Tensor, rounded_alone: torch.Tensor
) -> None:
    must = (rounded_alone - truth).norm()
    assert must > 0.005 * truth.norm()
    ours = forward(in_eight_bits(LINEARS)).double()
    # What is left: values at the middle of two, which fp32 and float64 round to different ones.
    assert (ours - rounded_alone).norm() < 0.25 * must
    assert (ours - truth).norm() < 1.1 * must


def test_attention_in_8_bits_adds_less_than_the_linears_did(
    truth: torch.Tensor, rounded_alone: torch.Tensor
) -> None:
    must = (rounded_alone - truth).norm()
    ours = forward(in_eight_bits()).double()
    plain = forward(in_eight_bits(LINEARS))
    assert not torch.equal(ours.float(), plain)
    assert (ours - truth).norm() < 1.2 * must


def test_what_is_large_is_in_8_bits_and_cross_attention_is_not() -> None:
    for block in in_eight_bits().blocks:
        assert isinstance(block.self_attention, Fp8SelfAttention)
        assert isinstance(block.feed_forward, Fp8FeedForward)
        own, feed_forward = block.self_attention, block.feed_forward
        for linear in (own.qkv, own.out, feed_forward.up, feed_forward.down):
            assert linear.weight.dtype == torch.float8_e4m3fn
        for linear in (block.text_q, block.text_k, block.text_v, block.text_out):
            assert isinstance(linear, Linear)
            assert linear.weight.dtype == torch.float32


def num_bytes(block: Any) -> int:
    sizes = []
    map_tensors(block, lambda tensor: (sizes.append(tensor.nbytes), tensor)[1])
    return sum(sizes)


def test_no_weight_is_held_twice() -> None:
    plain, transformer = WanTransformer(make_module()), in_eight_bits()
    assert not list(transformer.module.blocks.parameters())
    channels, hidden, eighth = 64, 160, 4 - 1  # bytes that each weight has less
    saved = eighth * (4 * channels**2 + 2 * channels * hidden)
    scales = 4 * (4 * channels + hidden + channels) + 4 * 2
    norms = 4 * 2 * channels  # over their heads' scales, and as they are for sparse attention
    for block, plain_block in zip(transformer.blocks, plain.blocks, strict=True):
        assert num_bytes(block) == num_bytes(plain_block) - saved + scales + norms


def test_kept_blocks_are_the_exact_ones() -> None:
    exact = forward(WanTransformer(make_module()))
    all_kept = WanTransformer(make_module(), convert=fp8_convert(BOTH, kept=frozenset(range(3))))
    assert torch.equal(forward(all_kept), exact)
    some_kept = WanTransformer(make_module(), convert=fp8_convert(BOTH, kept=frozenset({0, 2})))
    kinds = [type(block.self_attention) for block in some_kept.blocks]
    assert kinds == [PlainSelfAttention, Fp8SelfAttention, PlainSelfAttention]
    error, all_converted = ((forward(each) - exact).norm() for each in (some_kept, in_eight_bits()))
    assert 0 < error < all_converted


def test_blocks_of_sizes_that_tensor_cores_do_not_take_stay_as_they_are() -> None:
    module = make_odd_module()  # heads of 24 channels
    exact = forward(WanTransformer(make_odd_module()))
    transformer = WanTransformer(module, convert=fp8_convert(BOTH))
    assert all(isinstance(block.feed_forward, PlainFeedForward) for block in transformer.blocks)
    assert torch.equal(forward(transformer), exact)


@pytest.mark.parametrize("support", [BOTH, LINEARS], ids=str)
def test_streamed_blocks_compute_as_resident_ones(support: Fp8Support) -> None:
    streamed = in_eight_bits(support, streamed_to="cpu")
    assert torch.equal(forward(streamed), forward(in_eight_bits(support)))


def test_blocks_of_two_kinds_are_not_streamed() -> None:
    with pytest.raises(AssertionError, match="one kind"):
        WanTransformer(make_module(), convert=fp8_convert(BOTH, kept=frozenset({0})), streamed_to="cpu")


def test_a_clip_does_not_depend_on_its_neighbours() -> None:
    transformer = in_eight_bits()
    latents, text, timestep = inputs()
    tables = transformer.step_tables(timestep[None])

    def velocity(rows: slice) -> torch.Tensor:
        counts = torch.full((2,), text.shape[1], dtype=torch.int32)[rows]
        keys = transformer.text_keys(text[rows], counts)
        return transformer(
            latents[rows], blocks_L6D=tables.blocks_SL6D[0], head_2D=tables.head_S2D[0], texts=[keys]
        )[0]

    together, alone = velocity(slice(None))[1:], velocity(slice(1, 2))
    # fp32 sums of another order may fall to the other side of a middle, which is one step of e4m3.
    assert (together - alone).norm() < 0.01 * alone.norm()


@pytest.mark.parametrize(
    ("capability", "flash3", "expected", "said"),
    [
        ((9, 0), "0.0.3", BOTH, "linears and self-attention are in 8 bits"),
        ((9, 0), None, LINEARS, "pip install 'vgbatch[hopper]'"),
        ((10, 0), "0.0.3", LINEARS, "self-attention is not: FlashAttention-3 is for Hopper"),
        ((8, 9), "0.0.3", LINEARS, "self-attention is not"),
        (
            (8, 0),
            "0.0.3",
            Fp8Support(linears=False, attention=False),
            "compute capability is 8.0, 8.9 has it",
        ),
    ],
)
def test_a_card_says_what_it_computes_in_8_bits(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    flash3: str | None,
    expected: Fp8Support,
    said: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fp8, "flash3_version", lambda: flash3)
    support = fp8_support("cuda:0", dtype=torch.bfloat16)
    assert (support.linears, support.attention) == (expected.linears, expected.attention)
    assert said in str(support)
    assert "\n" not in str(support)


def test_in_fp32_a_card_computes_nothing_in_8_bits() -> None:
    support = fp8_support("cuda:0", dtype=torch.float32)
    assert fp8_convert(support) is None
    assert str(support) == "nothing is in 8 bits: torch.float32 was asked for, not torch.bfloat16"


def test_a_cpu_rounds_as_a_card_would() -> None:
    support = fp8_support("cpu", dtype=torch.float32)
    assert (support.linears, support.attention) == (True, True)
    assert "emulated" in str(support)
