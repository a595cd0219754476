"""Our decoder gives what diffusers' own does, in pieces of any size, of one clip after another."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan

from pipeline.kernels.upsample_rms_silu import repeated
from pipeline.models.protocol import joined
from pipeline.models.wan import WanModel
from pipeline.models.wan_vae.causal import channels_last, frame_by_frame, in_one
from pipeline.models.wan_vae.decoder import WanDecoder
from pipeline.models.wan_vae.sums import Sum
from pipeline.models.wan_vae.tiles import WHOLE, Grid
from pipeline.models.wan_vae.upsampling import Upsampled, folded
from tests.pipeline_ops import rand
from tests.pipeline_vaes import FILLED, KINDS, WAN22, Pair, diffusers_rgb, make_decoder, make_vae

SHAPES = [(1, 3, 5), (2, 1, 1), (3, 4, 2), (5, 3, 5)]  # latent frames and sides
ALL = 99


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


@pytest.mark.parametrize("frames_at_once", [1, 2, 3, ALL])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_clip_is_what_diffusers_decodes(
    pair: Pair, shape: tuple[int, int, int], frames_at_once: int
) -> None:
    latents = pair.latents(*shape)
    expected = diffusers_rgb(pair.vae, latents)
    rgb = pair.decoder.decode(latents, frames_at_once=frames_at_once)
    assert rgb.dtype == torch.float32
    assert rgb.shape == expected.shape
    assert expected.std() > 0.03
    assert (rgb - expected).abs().max() < 1e-5


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_it_is_as_near_the_truth_as_diffusers(kind: str, device: str) -> None:
    pair = Pair(kind)
    latents = pair.latents(3, 3, 5).bfloat16()
    truth = diffusers_rgb(pair.vae.double(), latents)
    theirs, ours = (make_vae(kind).to(device, torch.bfloat16) for _ in range(2))
    allowed = diffusers_rgb(theirs, latents) - truth
    error = make_decoder(kind, ours).decode(latents.to(device), frames_at_once=2).cpu() - truth
    assert error.square().mean().sqrt() <= 1.1 * allowed.square().mean().sqrt()


def test_clips_do_not_influence_each_other(pair: Pair) -> None:
    first, second = (pair.latents(4, 2, 3, seed=seed) for seed in (1, 2))
    alone = pair.decoder.decode(first, frames_at_once=2)
    other = pair.decoder.decode(second, frames_at_once=2)
    assert torch.equal(pair.decoder.decode(first, frames_at_once=2), alone)
    assert not torch.equal(other, alone)


def test_a_clip_left_half_decoded_does_not_influence_the_next(pair: Pair) -> None:
    first, second = (pair.latents(4, 2, 3, seed=seed) for seed in (1, 2))
    alone = pair.decoder.decode(second, frames_at_once=2)
    pieces = pair.decoder.decode_pieces(first, frames_at_once=2)
    for _ in range(3):
        next(pieces)
    assert torch.equal(pair.decoder.decode(second, frames_at_once=2), alone)
    with pytest.raises(AssertionError, match="another clip was begun"):
        next(pieces)


@pytest.mark.parametrize("frames_at_once", [1, 3])
def test_pieces_are_the_clip_in_order(pair: Pair, frames_at_once: int) -> None:
    latents = pair.latents(3, 2, 3)
    pieces = list(pair.decoder.decode_pieces(latents, frames_at_once=frames_at_once))
    lengths = [piece.rgb_3FHW.shape[1] for piece in pieces]
    assert lengths[0] == 1
    assert max(lengths) == frames_at_once
    assert [piece.first_frame for piece in pieces] == [0, *accumulate(lengths[:-1])]
    clip = pair.decoder.decode(latents, frames_at_once=frames_at_once)
    assert torch.equal(torch.cat([piece.rgb_3FHW for piece in pieces], dim=1), clip)


def test_clips_of_one_shape_share_their_memory(pair: Pair) -> None:
    def addresses(latents: torch.Tensor) -> list[int]:
        pair.decoder.decode(latents, frames_at_once=2)
        memory = pair.decoder._memory
        return [memory._window.data_ptr(), *(conv.history_2HWC.data_ptr() for conv in memory.convs)]

    first = addresses(pair.latents(2, 2, 3))
    assert addresses(pair.latents(3, 2, 3, seed=2)) == first
    assert pair.decoder.decode(pair.latents(2, 4, 1), frames_at_once=1).shape[1] == 5


@pytest.mark.parametrize("grid", [WHOLE, Grid(1, 2)], ids=str)
def test_what_is_laid_out_beforehand_is_what_decoding_uses(pair: Pair, grid: Grid) -> None:
    def addresses() -> list[int]:
        memories = (pair.decoder._middle_memory, pair.decoder._memory)
        return [conv.history_2HWC.data_ptr() for memory in memories for conv in memory.convs]

    pair.decoder.decode(pair.latents(1, 2, 1), frames_at_once=1)  # of another shape
    pair.decoder.lay_out(height=2, width=40, frames_at_once=1, grid=grid)
    laid_out = addresses()
    pair.decoder.decode(pair.latents(2, 2, 40), frames_at_once=1, grid=grid)
    assert addresses() == laid_out


def test_diffusers_still_runs_on_the_same_weights(pair: Pair) -> None:
    vae = deepcopy(pair.vae)
    latents = pair.latents(2, 3, 2)
    expected = diffusers_rgb(vae, latents)
    decoder = make_decoder(pair.kind, vae)
    assert (diffusers_rgb(vae, latents) - expected).abs().max() < 1e-5
    held = {parameter.data_ptr() for parameter in vae.parameters()}
    *convs, conv_out = decoder._memory.convs
    convs = [conv for conv in convs if not (pair.kind == FILLED and conv.scale == conv_out.scale)]
    assert convs
    assert all(conv.weight.data_ptr() in held for conv in convs)
    assert len(conv_out.weight) % 8 == 0


def test_the_last_blocks_of_wan21_are_filled_up_to_a_tile_of_channels() -> None:
    torch.manual_seed(5)
    vae = AutoencoderKLWan(base_dim=96, dim_mult=[1, 2], temperal_downsample=[True], num_res_blocks=1).eval()
    latents = rand(1, 16, 2, 2, 3, seed=1) / 2
    expected = diffusers_rgb(vae, latents)
    decoder = WanDecoder(vae)
    assert (decoder.decode(latents, frames_at_once=2) - expected).abs().max() < 1e-5
    *before, first, second, third, fourth, conv_out = decoder._memory.convs
    assert {conv.weight.shape[0] for conv in before} == {192, 384}
    assert {conv.weight.shape[:2] for conv in (first, second, third, fourth)} == {(128, 128)}
    assert conv_out.weight.shape[:2] == (8, 128)


@pytest.mark.parametrize("sides", [(1, 1), (3, 5), (4, 1)], ids=str)
def test_the_folded_kernel_doubles_and_convolves(sides: tuple[int, int]) -> None:
    kernel, frames = (rand(*shape, seed=1).double() for shape in [(5, 7, 3, 3), (2, 7, *sides)])
    expected = F.conv2d(F.interpolate(frames, scale_factor=2, mode="nearest-exact"), kernel, padding=1)
    quarters = F.conv2d(frames, folded(kernel), padding=1)
    height, width = sides
    for index, part in enumerate(quarters.chunk(4, dim=1)):
        a, b = divmod(index, 2)
        assert (part[:, :, a : a + height, b : b + width] - expected[:, :, a::2, b::2]).abs().max() < 1e-12


def unfolded_enter(kernels: dict[int, torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Upsampled.enter without the fold. kernels: the 3x3 ones, by the address of their folded ones."""

    def enter(self: Upsampled, conv: Any, gamma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        large = self.frames_THWC.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        kernel = kernels[self.kernel_QC22.data_ptr()]
        branch = F.conv2d(large.permute(0, 3, 1, 2), kernel, padding=1).permute(0, 2, 3, 1)
        residual = None
        if self.shortcut_THWC is not None:
            copies = repeated(self.shortcut_THWC, channels=len(self.bias_O), time_factor=self.time_factor)
            residual = copies[self.first_frame : self.first_frame + len(branch)]
        return Sum(branch, self.bias_O, residual).enter(conv, gamma)

    return enter


def test_a_clip_is_the_same_without_the_fold(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = pair.latents(3, 3, 5)
    with_fold = pair.decoder.decode(latents, frames_at_once=2)
    kernels = {}
    for ours, theirs in zip(pair.decoder._up_blocks, pair.vae.decoder.up_blocks, strict=False):
        resample = theirs.upsampler if pair.vae.config.is_residual else theirs.upsamplers[0]
        weight = resample.resample[1].weight.detach()
        missing = len(ours.upsampling.bias_O) - len(weight)
        kernels[ours.upsampling.kernel_QC22.data_ptr()] = F.pad(weight, [0, 0, 0, 0, 0, 0, 0, missing])
    monkeypatch.setattr(Upsampled, "enter", unfolded_enter(kernels))
    without = pair.decoder.decode(latents, frames_at_once=2)
    assert not torch.equal(with_fold, without)
    assert (with_fold - without).abs().max() < 1e-5


@pytest.mark.parametrize(("kernel", "padding"), [((3, 3, 3), 1), ((3, 1, 1), 0)], ids=str)
@pytest.mark.parametrize("window", [(3, 1, 1), (4, 3, 5), (7, 4, 1)], ids=str)
def test_both_ways_of_convolving_are_one(
    window: tuple[int, int, int], kernel: tuple[int, int, int], padding: int
) -> None:
    module = torch.nn.Conv3d(7, 5, kernel, bias=False).double()
    before = module.weight.detach().clone()
    weight, frames = channels_last(module), rand(*window, 7, seed=1).double()
    assert torch.equal(weight, before)
    expected = in_one(frames, weight, padding=padding)
    assert expected.shape == (window[0] - 2, *window[1:], 5)
    assert (frame_by_frame(frames, weight, padding=padding) - expected).abs().max() < 1e-12


def test_frames_at_once_follow_the_memory() -> None:
    with torch.device("meta"):
        decoder = WanDecoder(AutoencoderKLWan(**WAN22).bfloat16())

    def frames(gigabytes: float, height: int = 48, width: int = 84) -> int:
        return decoder.frames_at_once(height=height, width=width, free_bytes=int(gigabytes * 1e9))

    # At 1344x768, then smaller; where all fits, sixteen, unless a window outgrew 32 bits.
    assert [frames(size) for size in (0, 5, 7, 10, 16)] == [1, 1, 2, 4, 8]
    assert frames(1000) == 8
    assert frames(1000, 16, 16) == 16


def test_a_model_decodes_what_its_denoiser_made(pair: Pair) -> None:
    model = WanModel(
        tokenizer=None,
        text_encoder=None,
        vae=deepcopy(pair.vae),
        experts=[],
        scheduler_config={},
        boundary_timestep=None,
    )
    latents, config = pair.latents(3, 2, 3), pair.vae.config
    mean, std = (
        torch.tensor(values).view(-1, 1, 1, 1) for values in (config.latents_mean, config.latents_std)
    )
    expected = diffusers_rgb(pair.vae, latents * std + mean)
    rgb = joined(list(model.decode(latents)))
    assert (rgb - expected).abs().max() < 1e-5
