"""A decode in 8 bits is as far from float64 as rounding must bring it, in pieces and tiles of any size."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import nn

from pipeline.approx import fp8_decoder
from pipeline.approx.fp8_decoder import Fp8Conv, fp8_conv_maker, make_fp8_conv, why_plain
from pipeline.models.resolve import resolve_model
from pipeline.models.wan import WanModel
from pipeline.models.wan_vae.causal import CausalConv, plain_conv
from pipeline.models.wan_vae.decoder import WanDecoder
from pipeline.models.wan_vae.tiles import WHOLE, Grid
from tests.pipeline_checkpoints import make_batch, make_engine, make_job
from tests.pipeline_ops import rand
from tests.pipeline_vaes import WAN22, diffusers_rgb, make_vae

E4M3 = torch.float8_e4m3fn
KINDS = ("built-in", "residual", "residual, some too narrow")
ALL = 99


def make(kind: str) -> Any:
    if kind == "built-in":
        return make_vae(kind)
    torch.manual_seed(3)
    narrow = kind == "residual, some too narrow"
    sizes = {"base_dim": 4, "decoder_base_dim": 8 if narrow else 16, "z_dim": 6, "num_res_blocks": 1}
    statistics = {"latents_mean": [0.0] * 6, "latents_std": [1.0] * 6}
    vae = AutoencoderKLWan(**WAN22 | sizes | statistics)
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return vae.eval().requires_grad_(False)


def with_rounded_convs(vae: Any) -> Any:
    """The oracle: diffusers' own decoder, in which the same convolutions round inputs and weights."""
    for block in vae.decoder.modules():
        if hasattr(block, "conv2"):
            for norm, conv in ((block.norm1, block.conv1), (block.norm2, block.conv2)):
                if not any(size % 16 for size in conv.weight.shape[:2]):
                    round_conv(conv, norm.gamma.flatten())
    return vae


def round_conv(conv: nn.Conv3d, gamma_C: torch.Tensor) -> None:
    scales_C = (gamma_C.abs() * len(gamma_C) ** 0.5 / 448).view(-1, 1, 1, 1)
    weight = conv.weight * scales_C
    steps = weight.abs().amax((1, 2, 3, 4), keepdim=True) / 448
    conv.weight.data = rounded(weight / steps) * steps / scales_C

    def rounded_input(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """x, and the frames before it where there are any."""
        return tuple(rounded(x / scales_C) * scales_C if torch.is_tensor(x) else x for x in given)

    conv.register_forward_pre_hook(rounded_input)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.float().to(E4M3).to(x.dtype)


class Sides:
    """One VAE: in 8 bits, exactly, and as rounding alone makes it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.vae = make(kind)
        self.decoder = WanDecoder(deepcopy(self.vae), make_conv=make_fp8_conv)
        self.latents = rand(1, self.vae.config.z_dim, 4, 3, 5, seed=1) / 2
        wide = deepcopy(self.vae).double()
        self.truth = diffusers_rgb(wide, self.latents)
        with torch.no_grad():
            self.rounded_alone = diffusers_rgb(with_rounded_convs(wide), self.latents)
        self.must = (self.rounded_alone - self.truth).norm()

    def decode(self, latents: torch.Tensor | None = None, **settings: Any) -> torch.Tensor:
        settings = {"frames_at_once": 2} | settings
        return self.decoder.decode(self.latents if latents is None else latents, **settings).double()


@pytest.fixture(scope="module", params=KINDS)
def sides(request: pytest.FixtureRequest) -> Sides:
    return Sides(request.param)


@pytest.mark.parametrize("frames_at_once", [1, 2, ALL])
def test_a_clip_is_the_one_whose_convolutions_were_rounded(sides: Sides, frames_at_once: int) -> None:
    assert sides.must > 1e-4 * sides.truth.norm()
    ours = sides.decode(frames_at_once=frames_at_once)
    # Not value by value: what fp32 and float64 round to different values makes more of them do so in the next
    # layer, and after some ten the two err as if they had nothing to do with each other.
    assert (ours - sides.rounded_alone).norm() < 1.2 * sides.must
    assert 0.8 * sides.must < (ours - sides.truth).norm() < 1.2 * sides.must


def test_tiles_are_the_whole_picture(sides: Sides) -> None:
    latents = rand(1, sides.vae.config.z_dim, 2, 2, 40, seed=2) / 2
    whole, in_tiles = (sides.decode(latents, grid=grid) for grid in (WHOLE, Grid(1, 2)))
    exact = diffusers_rgb(sides.vae, latents)
    assert (in_tiles - whole).norm() < 1.2 * (whole - exact).norm()
    assert (in_tiles - whole).abs().max() < 1.5 * (
        whole - exact
    ).abs().max()  # a seam would be a line of them


def test_clips_do_not_influence_each_other(sides: Sides) -> None:
    other = rand(1, sides.vae.config.z_dim, 3, 3, 5, seed=3)
    alone = sides.decode()
    pieces = sides.decoder.decode_pieces(other, frames_at_once=2)
    next(pieces)  # and is left there
    assert torch.equal(sides.decode(), alone)
    assert not torch.equal(sides.decode(other)[:, :5], alone[:, :5])


def convs_of(decoder: WanDecoder) -> list[CausalConv]:
    return [*decoder._middle_memory.convs, *decoder._memory.convs]


def test_what_no_norm_bounds_and_the_last_one_stay_plain(sides: Sides) -> None:
    *_, conv_out = convs = convs_of(sides.decoder)
    plain_convs = convs_of(WanDecoder(deepcopy(sides.vae)))
    for conv, plain in zip(convs, plain_convs, strict=True):
        is_between_norms = plain.weight.shape[-1] == 3 and conv is not conv_out
        fits = not any(size % 16 for size in plain.weight.shape[:2])
        assert isinstance(conv, Fp8Conv) == (is_between_norms and fits)
        assert (conv.scale, conv.radius) == (plain.scale, plain.radius)
    assert any(isinstance(conv, Fp8Conv) for conv in convs)
    fits_everywhere = all(isinstance(conv, Fp8Conv) for conv in convs if conv.radius and conv is not conv_out)
    assert fits_everywhere == (sides.kind != "residual, some too narrow")


def test_windows_and_histories_take_a_byte_a_value_and_lie_where_they_did(sides: Sides) -> None:
    def addresses() -> list[int]:
        sides.decode(frames_at_once=2)
        return [memory._window.data_ptr(), *(conv.history_2HWC.data_ptr() for conv in memory.convs)]

    memory = sides.decoder._memory
    assert addresses() == addresses()
    for conv in memory.convs:
        dtype = E4M3 if isinstance(conv, Fp8Conv) else torch.float32
        assert conv.history_2HWC.dtype == conv.window(1).dtype == dtype
        assert conv.window(1).data_ptr() == memory._window.data_ptr()
    plain = WanDecoder(deepcopy(sides.vae))._memory
    ours, theirs = (each.needed_bytes(height=3, width=5, frames_at_once=2) for each in (memory, plain))
    assert ours < 0.9 * theirs


def test_no_weight_is_held_twice(sides: Sides) -> None:
    vae = deepcopy(sides.vae)
    decoder = WanDecoder(vae, make_conv=make_fp8_conv)
    num_converted = sum(isinstance(conv, Fp8Conv) for conv in convs_of(decoder))
    gone = [
        module for module in vae.decoder.modules() if isinstance(module, nn.Conv3d) and module.weight is None
    ]
    assert len(gone) == num_converted > 0


def test_blocks_that_are_filled_up_are_in_8_bits_too() -> None:
    torch.manual_seed(5)
    vae = AutoencoderKLWan(base_dim=96, dim_mult=[1, 2], temperal_downsample=[True], num_res_blocks=1).eval()
    latents = rand(1, 16, 2, 2, 3, seed=1) / 2
    exact = diffusers_rgb(vae, latents)
    with torch.no_grad():
        must = (diffusers_rgb(with_rounded_convs(deepcopy(vae).double()), latents) - exact).norm()
    ours = WanDecoder(vae, make_conv=make_fp8_conv).decode(latents, frames_at_once=2)
    # Their norms' bound counts the zeros as well, so that other values are rounded.
    assert 0 < (ours - exact).norm() < 1.2 * must


@pytest.mark.parametrize(
    ("capability", "dtype", "said"),
    [
        ((9, 0), torch.bfloat16, ""),
        ((10, 0), torch.bfloat16, ""),
        ((8, 9), torch.bfloat16, "the card's compute capability is 8.9, not 9.x or 10.x"),
        ((12, 0), torch.bfloat16, "the card's compute capability is 12.0, not 9.x or 10.x"),
        ((9, 0), torch.float32, "torch.float32 was asked for, not torch.bfloat16"),
    ],
)
def test_a_card_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fp8_decoder, "TensorDescriptor", object)
    ask = partial(why_plain, "cuda:0", dtype=dtype)
    assert ask() == said
    assert fp8_conv_maker("cuda:0", dtype=dtype) is (plain_conv if said else make_fp8_conv)
    monkeypatch.setattr(fp8_decoder, "TensorDescriptor", None)
    assert ask()


def test_a_cpu_rounds_as_a_card_would() -> None:
    assert fp8_conv_maker("cpu", dtype=torch.float32) is make_fp8_conv


def test_presets_with_fp8_decode_in_8_bits_and_exact_does_not() -> None:
    model = resolve_model("builtin")
    engine = make_engine(model)

    def rendered(preset: str) -> tuple[Any, bool]:
        """The frames, and whether any convolution was in 8 bits."""
        job = make_job(model, preset=preset, steps=1, width=16, height=16)
        (clip,) = engine.render(make_batch(model, job)).clips
        assert engine._loaded is not None
        assert isinstance(engine._loaded.model, WanModel)
        return clip.frames, any(isinstance(conv, Fp8Conv) for conv in convs_of(engine._loaded.model._decoder))

    (exact, *before), (_, *during), (again, *after) = map(rendered, ("exact", "fp8", "exact"))
    assert (before, during, after) == ([False], [True], [False])
    assert (exact == again).all()
