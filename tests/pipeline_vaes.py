"""VAEs of every layout, small and random, beside our decoders of the same weights."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import AutoencoderKLWan

from pipeline.models import tiny
from pipeline.models.wan_vae import filling
from pipeline.models.wan_vae.decoder import WanDecoder
from tests.pipeline_checkpoints import _plain_vae, _residual_vae
from tests.pipeline_ops import rand

FILLED = "plain, filled up"
KINDS = ("plain", FILLED, "residual", "residual, time last", "built-in")
WAN22 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}


def make_vae(kind: str) -> Any:
    if kind == "built-in":
        return AutoencoderKLWan.from_pretrained(Path(tiny.__file__).parent / "vae").eval()
    torch.manual_seed(3)
    vae = _plain_vae() if kind in ("plain", FILLED) else _residual_vae()
    if kind == "residual, time last":  # then the shortcut's copies of a frame differ from each other
        config = {name: value for name, value in vae.config.items() if not name.startswith("_")}
        vae = AutoencoderKLWan(**config | {"temperal_downsample": [True, True, False]})
    with torch.no_grad():
        for parameter in vae.parameters():  # no weight of one and no bias of zero may hide a mistake
            parameter.add_(0.1 * torch.randn_like(parameter))
    return vae.eval()


def make_decoder(kind: str, vae: Any) -> WanDecoder:
    """Over the given weights. The small VAEs have too few channels to be filled up if nobody insists."""
    if kind != FILLED:
        return WanDecoder(vae)
    with patch.multiple(filling, _TILE=7, _FEWEST=4):
        return WanDecoder(vae)


class Pair:
    """diffusers' own VAE, and our decoder of the same weights."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.vae = make_vae(kind)
        self.decoder = make_decoder(kind, deepcopy(self.vae))

    def latents(self, num_latents: int, height: int, width: int, *, seed: int = 1) -> torch.Tensor:
        return rand(1, self.vae.config.z_dim, num_latents, height, width, seed=seed) / 2


@torch.no_grad()
def diffusers_rgb(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    return (vae.decode(latents.to(vae.device, vae.dtype)).sample[0] * 0.5 + 0.5).double().cpu()
