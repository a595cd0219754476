"""The Wan family: 2.1 text-to-video, 2.2 TI2V 5B and 2.2 A14B with its two experts.

Shapes: as in protocol.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers.utils.logging
import torch
import torch.nn.functional as F
import transformers.utils.logging
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from transformers import AutoTokenizer, UMT5EncoderModel

from pipeline.config import LoraSource, ModelSource
from pipeline.devices import device_memory_bytes
from pipeline.memory.residency import is_streamed, transformer_bytes
from pipeline.models.hub import fetch_weights
from pipeline.models.lora import FusedLoras
from pipeline.models.protocol import Piece
from pipeline.models.text import MAX_TOKENS
from pipeline.models.text_encoder import encode_prompts, page_locked
from pipeline.models.wan_denoiser import PaddedTexts, WanDenoiser
from pipeline.models.wan_transformer import BackendOf, Convert, WanTransformer, torch_attention
from pipeline.models.wan_vae.causal import MakeConv, plain_conv
from pipeline.models.wan_vae.decoder import WanDecoder
from pipeline.models.wan_vae.tiles import WHOLE, Grid

# Of a device's memory, for decoding, weights aside. Of all of it, as how many frames are decoded at once can
# change a pixel's last bit, and a clip must not depend on what else its card holds. With an H200's 140 GiB,
# Wan2.2 at 1344x768 decodes four at once, in about 9 GiB with its weights.
_DECODE_FRAC = 1 / 12
# Where one frame at a time takes more than this, it is decoded in tiles that do not. A resident transformer
# leaves 2/5; the rest is for the weights of the VAE, latents, and what CUDA and its libraries hold.
_WHOLE_FRAC = 1 / 3


class WanModel:
    """A VideoModel over the components of a diffusers WanPipeline.

    experts: one transformer, or the high-noise and the low-noise one. frames_at_once: latent frames to decode
    at a time, as whole pictures (default: by the device's memory, and in tiles where one is too many). loras:
    in the experts' weights, where others can take their place. make_conv: as WanDecoder's.
    """

    def __init__(
        self,
        *,
        tokenizer: Any,
        text_encoder: Any,
        vae: Any,
        experts: Sequence[WanTransformer],
        scheduler_config: Mapping[str, Any],
        boundary_timestep: float | None,
        frames_at_once: int | None = None,
        loras: FusedLoras | None = None,
        make_conv: MakeConv = plain_conv,
    ) -> None:
        self.tokenizer = tokenizer
        self.text_encoder = text_encoder
        self.vae = vae
        self.experts = experts
        self.scheduler_config = scheduler_config
        self.boundary_timestep = boundary_timestep
        self._frames_at_once = frames_at_once
        self._loras = loras
        self._make_conv = make_conv
        self._denoisers: dict[int, WanDenoiser] = {}

    def use_loras(self, loras: Sequence[LoraSource]) -> bool:
        if self._loras is None:
            return False
        self._loras.use(loras)
        return True

    def encode(self, prompts: Sequence[str]) -> list[torch.Tensor]:
        device = self.experts[0].module.patch_embedding.weight.device
        return encode_prompts(prompts, tokenizer=self.tokenizer, module=self.text_encoder, device=device)

    def latent_shape(self, *, width: int, height: int, num_frames: int) -> tuple[int, int, int, int]:
        spatial, temporal = self.vae.config.scale_factor_spatial, self.vae.config.scale_factor_temporal
        multiple = spatial * self.experts[0].patch[1]
        assert width % multiple == height % multiple == (num_frames - 1) % temporal == 0, (
            width,
            height,
            num_frames,
        )
        return self.vae.config.z_dim, (num_frames - 1) // temporal + 1, height // spatial, width // spatial

    def denoiser(
        self,
        prompts: Sequence[torch.Tensor],
        negatives: Sequence[torch.Tensor],
        *,
        timesteps: torch.Tensor,
        expert: int,
    ) -> WanDenoiser:
        transformer = self.experts[expert]
        device = transformer.module.patch_embedding.weight.device
        denoiser = self._denoisers.setdefault(expert, WanDenoiser(transformer))
        denoiser.bind(
            [padded(texts, device=device) for texts in (prompts, negatives) if texts], timesteps_S=timesteps
        )
        return denoiser

    def lay_out(self, shape_CTHW: tuple[int, int, int, int]) -> None:
        *_, height, width = shape_CTHW
        frames_at_once, grid = self._decoding(*shape_CTHW[1:])
        self._decoder.lay_out(height=height, width=width, frames_at_once=frames_at_once, grid=grid)

    def decode(self, latents_1CTHW: torch.Tensor) -> Iterator[Piece]:
        frames_at_once, grid = self._decoding(*latents_1CTHW.shape[2:])
        return self._decoder.decode_pieces(
            self._decoder_input(latents_1CTHW), frames_at_once=frames_at_once, grid=grid
        )

    @cached_property
    def _decoder(self) -> WanDecoder:
        return WanDecoder(self.vae, make_conv=self._make_conv)

    def _decoder_input(self, latents_1CTHW: torch.Tensor) -> torch.Tensor:
        mean, std = (
            torch.tensor(values, device=latents_1CTHW.device).view(1, -1, 1, 1, 1)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        return (latents_1CTHW.float() / (1.0 / std) + mean).to(self.vae.dtype)

    def _decoding(self, num_latents: int, height: int, width: int) -> tuple[int, Grid]:
        """How many latent frames at once, in which grid of tiles."""
        if self._frames_at_once is not None:
            return self._frames_at_once, WHOLE
        memory_bytes = device_memory_bytes(str(self.vae.device))
        frames_at_once = self._decoder.frames_at_once(
            height=height, width=width, free_bytes=int(_DECODE_FRAC * memory_bytes)
        )
        grid = self._decoder.grid(
            num_latents=num_latents, height=height, width=width, free_bytes=int(_WHOLE_FRAC * memory_bytes)
        )
        return frames_at_once, grid


def padded(prompts: Sequence[torch.Tensor], *, device: torch.device) -> PaddedTexts:
    """As Wan was trained: zeros, unmasked, after the prompt. prompts: (L, E) each."""
    rows = [F.pad(prompt_LE, (0, 0, 0, MAX_TOKENS - len(prompt_LE))) for prompt_LE in prompts]
    counts_B = torch.tensor([len(prompt_LE) for prompt_LE in prompts], dtype=torch.int32)
    return torch.stack(rows).to(device), counts_B.to(device)


def load_wan(
    source: ModelSource,
    *,
    device: str,
    dtype: str,
    vae_dtype: str,
    backend_of: BackendOf = torch_attention,
    convert: Convert | None = None,
    make_conv: MakeConv = plain_conv,
) -> WanModel:
    """Read a checkpoint's safetensors onto a device. dtype: of transformers and text encoder.

    backend_of: the attention library for self-attention of a shape. convert: as WanTransformer's.
    make_conv: as WanDecoder's.

    Raises ModelError when a hub model's weights cannot be fetched.
    """
    folder = (
        source.folder if source.hub_id is None else fetch_weights(source.hub_id, commit=source.base_revision)
    )
    index = _read_json(folder / "model_index.json")
    scheduler_config = _read_json(folder / "scheduler" / "scheduler_config.json")
    boundary_ratio = index.get("boundary_ratio")
    names = ["transformer"] if boundary_ratio is None else ["transformer", "transformer_2"]
    _quieten()
    modules = [
        _load_transformer(folder / name, device=device, dtype=getattr(torch, dtype), num_experts=len(names))
        for name in names
    ]
    loras = FusedLoras(modules)
    loras.use(source.loras)
    experts = [_expert(module, device=device, backend_of=backend_of, convert=convert) for module in modules]
    return WanModel(
        tokenizer=_load_tokenizer(folder),
        text_encoder=_load_text_encoder(folder, device, getattr(torch, dtype)),
        vae=_load_vae(folder, device, getattr(torch, vae_dtype)),
        experts=experts,
        loras=loras if all(len(module.blocks) for module in modules) else None,
        make_conv=make_conv,
        scheduler_config=scheduler_config,
        boundary_timestep=None
        if boundary_ratio is None
        else boundary_ratio * scheduler_config.get("num_train_timesteps", 1000),
    )


def _load_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)


def _load_text_encoder(folder: Path, device: str, dtype: torch.dtype) -> Any:
    # transformers took `dtype` later than our oldest supported one, diffusers warns of `torch_dtype`.
    module = _on_device(UMT5EncoderModel, folder / "text_encoder", "cpu", torch_dtype=dtype)
    return module if device == "cpu" else page_locked(module)


def _load_vae(folder: Path, device: str, dtype: torch.dtype) -> Any:
    return _on_device(AutoencoderKLWan, folder / "vae", device, dtype=dtype)


def _load_transformer(folder: Path, *, device: str, dtype: torch.dtype, num_experts: int) -> Any:
    """On the device, or in host memory to be streamed from there."""
    module = _on_device(WanTransformer3DModel, folder, "cpu", dtype=dtype)
    num_bytes = transformer_bytes(module.config, num_experts=num_experts, bytes_per_weight=dtype.itemsize)
    if device != "cpu" and is_streamed(num_bytes, card_bytes=device_memory_bytes(device)):
        return module
    return module.to(device)


def _expert(module: Any, *, device: str, backend_of: BackendOf, convert: Convert | None) -> WanTransformer:
    is_there = module.patch_embedding.weight.device.type == torch.device(device).type
    return WanTransformer(
        module, backend_of=backend_of, streamed_to=None if is_there else device, convert=convert
    )


def _on_device(component: Any, folder: Path, device: str, **dtype: torch.dtype) -> Any:
    module = component.from_pretrained(folder, use_safetensors=True, local_files_only=True, **dtype)
    return module.eval().requires_grad_(False).to(device)


def _quieten() -> None:
    """No progress bars and no advice: a worker's stderr is a log."""
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))
