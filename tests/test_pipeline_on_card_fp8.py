"""8-bit products and attention on a card, beside those of the same 8-bit numbers in fp32.

What a card does not have it does not use, and there is nothing to show of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from pipeline.approx.fp8 import Fp8Support, fp8_convert, fp8_support
from pipeline.approx.fp8_decoder import make_fp8_conv, why_plain
from pipeline.kernels.fp8_attention import fp8_attention, plain_fp8_attention
from pipeline.kernels.fp8_conv import fp8_conv, fp8_kernel, plain_fp8_conv
from pipeline.kernels.fp8_linear import fp8_linear, fp8_weight, plain_fp8_linear
from pipeline.kernels.fp8_qkv import fp8_norms, fp8_qkv
from pipeline.kernels.fp8_rows import fp8_rows
from pipeline.models.wan_transformer import WanTransformer
from pipeline.models.wan_vae.decoder import WanDecoder
from tests.pipeline_ops import EPS, rand
from tests.pipeline_vaes import make_vae
from tests.test_pipeline_wan_transformer import forward

CARD = "cuda:0"
SUPPORT = fp8_support(CARD, dtype=torch.bfloat16)


def make_module(*, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(11)
    module = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=64,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=640,
        num_layers=3,
        rope_max_seq_len=32,
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return module.to(device, dtype).eval().requires_grad_(False)


@pytest.mark.parametrize(("tokens", "channels"), [(33, 3072), (127, 14336), (2049, 14336)])
def test_short_accumulators_add_less_than_a_tenth_to_what_rounding_costs(tokens: int, channels: int) -> None:
    if not SUPPORT.linears:
        return
    x = rand(1, tokens, channels, seed=1, device=CARD)
    weight = rand(256, channels, seed=2, device=CARD) / channels**0.5
    bias = rand(256, seed=3, device=CARD)
    truth = x.double() @ weight.double().t() + bias.double()
    rows, (values, scales) = fp8_rows(x), fp8_weight(weight)
    in_fp32 = plain_fp8_linear(*rows, values, scales, bias).double()
    ours = fp8_linear(rows, weight=values, scales=scales, bias=bias.to(torch.bfloat16)).double()
    assert (ours - truth).norm() <= 1.1 * (in_fp32 - truth).norm()


@pytest.mark.parametrize("sizes", [(1, 300, 2, 128), (2, 77, 3, 64), (1, 9000, 2, 128)], ids=str)
def test_attention_errs_by_what_rounding_the_weights_costs(sizes: tuple[int, int, int, int]) -> None:
    if not SUPPORT.attention:
        return
    clips, tokens, heads, head_channels = sizes
    channels = heads * head_channels
    qkv = rand(clips, tokens, 3 * channels, seed=1, dtype=torch.bfloat16, device=CARD)
    weights = rand(2, channels, seed=2, device=CARD).abs() / 2
    angle = rand(tokens, head_channels // 2, seed=3, device=CARD)
    norms = fp8_norms(*weights, num_heads=heads)
    values = fp8_qkv(
        qkv,
        weights_2D=norms.weights_2D,
        eps=EPS,
        num_heads=heads,
        rope=(angle.cos()[:, None], angle.sin()[:, None]),
    ).values_BN3D
    parts = [part.unflatten(-1, (heads, -1)) for part in values.chunk(3, dim=-1)]
    scores_BHNN = torch.einsum("bnhk,bmhk->bhnm", *(part.float() for part in parts[:2]))
    weights_BHNN = (scores_BHNN * norms.score_scales_H[:, None, None] * head_channels**-0.5).softmax(-1)
    truth = torch.einsum("bhnm,bmhk->bnhk", weights_BHNN, parts[2].float()).flatten(2)
    in_fp32 = plain_fp8_attention(*parts, score_scales_H=norms.score_scales_H).flatten(2)
    ours = fp8_attention(values, score_scales=norms.score_scales_H)
    assert ours.dtype == torch.bfloat16
    # It rounds them block by block, each beside the largest score so far, and its own sums to bfloat16.
    assert (ours.float() - truth).norm() <= 1.1 * (in_fp32 - truth).norm() + 2**-9 * truth.norm()


def test_a_forward_is_the_emulated_one() -> None:
    if not SUPPORT.linears:
        return
    convert = fp8_convert(SUPPORT)
    emulated = forward(WanTransformer(make_module(device="cpu", dtype=torch.float32), convert=convert))
    exact = forward(WanTransformer(make_module(device="cpu", dtype=torch.float32)))
    half = forward(WanTransformer(make_module(device=CARD, dtype=torch.bfloat16))).float().cpu()
    ours = forward(WanTransformer(make_module(device=CARD, dtype=torch.bfloat16), convert=convert))
    must = (emulated - exact).norm() + (half - exact).norm()
    assert (ours.float().cpu() - exact).norm() < 1.3 * must


@pytest.mark.parametrize("support", [SUPPORT, Fp8Support(linears=True, attention=False)], ids=str)
def test_streamed_blocks_compute_as_resident_ones(support: Fp8Support) -> None:
    if not SUPPORT.linears:
        return
    convert = fp8_convert(support)
    module = make_module(device="cpu", dtype=torch.bfloat16)
    streamed = forward(WanTransformer(module, convert=convert, streamed_to=CARD))
    resident = forward(WanTransformer(make_module(device=CARD, dtype=torch.bfloat16), convert=convert))
    assert (streamed.float() - resident.float()).norm() < 0.01 * resident.float().norm()


def test_the_weights_that_were_converted_are_gone() -> None:
    if not SUPPORT.linears:
        return
    module = make_module(device=CARD, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated(CARD)
    linear_bytes = 2 * sum(
        part.weight.numel()
        for block in module.blocks
        for part in (*block.attn1.modules(), *block.ffn.modules())
        if isinstance(part, torch.nn.Linear)
    )
    transformer = WanTransformer(module, convert=fp8_convert(SUPPORT))
    assert before - torch.cuda.memory_allocated(CARD) > 0.4 * linear_bytes
    assert len(transformer.blocks) == 3


# Frames, sides and channels of the window; outputs. Of Wan's decoders, with tiles that stick out.
@pytest.mark.parametrize(
    ("shape", "outputs"),
    [((3, 9, 20, 1024), 512), ((6, 33, 50, 256), 256), ((3, 8, 16, 128), 128)],
    ids=str,
)
def test_short_accumulators_add_less_than_a_tenth_to_what_rounding_a_convolution_costs(
    shape: tuple[int, ...], outputs: int
) -> None:
    if why_plain(CARD, dtype=torch.bfloat16):
        return
    x = torch.nn.functional.silu(rand(*shape, seed=1, device=CARD))
    weight = rand(outputs, shape[-1], 3, 3, 3, seed=2, device=CARD) / (27 * shape[-1]) ** 0.5
    ones = weight.new_ones(shape[-1])
    kernel, window = fp8_kernel(weight / 16, input_scales=ones), (16 * x).to(torch.float8_e4m3fn)
    in_fp32 = plain_fp8_conv(window, *kernel, torch.float32)
    truth = plain_fp8_conv(x, weight, ones[0].expand(outputs), torch.float32)
    ours = fp8_conv(window, kernel=kernel, dtype=torch.bfloat16).float()
    assert (ours - truth).norm() <= 1.1 * (in_fp32 - truth).norm()
    twice = fp8_conv(window, kernel=kernel, dtype=torch.bfloat16).float()
    assert torch.equal(ours, twice)


def test_a_decode_is_the_emulated_one() -> None:
    if why_plain(CARD, dtype=torch.bfloat16):
        return
    latents = rand(1, 8, 4, 5, 7, seed=1) / 2

    def decoded(device: str, dtype: torch.dtype, **how: Any) -> torch.Tensor:
        vae = make_vae("built-in").requires_grad_(False).to(device, dtype)
        return WanDecoder(vae, **how).decode(latents.to(device, dtype), frames_at_once=2).cpu()

    exact = decoded("cpu", torch.float32)
    emulated = decoded("cpu", torch.float32, make_conv=make_fp8_conv)
    half = decoded(CARD, torch.bfloat16)
    ours = decoded(CARD, torch.bfloat16, make_conv=make_fp8_conv)
    assert (ours - exact).norm() < 1.3 * ((emulated - exact).norm() + (half - exact).norm())
