"""The VAE over a whole clip is diffusers' own, chunk by chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan

from pipeline.models.tiny import whole_clip

SHAPES = [(1, 16, 16), (5, 16, 32), (17, 32, 16)]


@pytest.fixture(scope="module", params=[1, 2])
def vae(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=8, z_dim=6, num_res_blocks=request.param).eval()
    with torch.no_grad():
        for parameter in vae.parameters():  # no weight of one and no bias of zero may hide a mistake
            parameter.add_(0.1 * torch.randn_like(parameter))
    return vae


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(0, 2, 3, 4, 1)


@pytest.mark.parametrize(("frames", "height", "width"), SHAPES)
@torch.no_grad()
def test_encoding_a_whole_clip_is_encoding_its_chunks(vae: Any, frames: int, height: int, width: int) -> None:
    video = torch.randn(2, 3, frames, height, width)
    chunked = channels_last(vae.encode(video).latent_dist.parameters)
    whole = whole_clip.encode(dict(vae.named_parameters()), channels_last(video))
    assert chunked.std() > 0.1
    assert (whole - chunked).abs().max() < 1e-4


@pytest.mark.parametrize(("frames", "height", "width"), SHAPES)
@torch.no_grad()
def test_decoding_a_whole_clip_is_decoding_its_chunks(vae: Any, frames: int, height: int, width: int) -> None:
    latents = torch.randn(2, 6, (frames - 1) // 4 + 1, height // 8, width // 8)
    chunked = channels_last(vae.decode(latents).sample)
    whole = whole_clip.decode(dict(vae.named_parameters()), channels_last(latents)).clamp(-1, 1)
    assert chunked.std() > 0.1
    assert (whole - chunked).abs().max() < 1e-4


@torch.no_grad()
def test_the_first_frames_latents_do_not_depend_on_later_frames(vae: Any) -> None:
    video = torch.randn(1, 17, 16, 16, 3)
    weights = dict(vae.named_parameters())
    whole, beginning = whole_clip.encode(weights, video), whole_clip.encode(weights, video[:, :9])
    assert (whole[:, :3] - beginning).abs().max() < 1e-5


def test_a_norm_of_zeros_is_zeros() -> None:
    assert torch.equal(whole_clip.rms_norm(torch.zeros(2, 4), torch.ones(4)), torch.zeros(2, 4))
