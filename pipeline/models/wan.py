"""The Wan family: 2.1 text-to-video, 2.2 TI2V 5B and 2.2 A14B with its two experts.

Shapes: as in protocol.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers.utils.logging
import torch
import transformers.utils.logging
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from transformers import AutoTokenizer, UMT5EncoderModel

from pipeline.config import ModelSource
from pipeline.models.hub import fetch_weights
from pipeline.models.text import MAX_TOKENS, clean_prompt
from pipeline.models.wan_transformer import TextStates, WanTransformer


class WanModel:
    """A VideoModel over the components of a diffusers WanPipeline.

    experts: one transformer, or the high-noise and the low-noise one.
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
    ) -> None:
        self.tokenizer = tokenizer
        self.text_encoder = text_encoder
        self.vae = vae
        self.experts = experts
        self.scheduler_config = scheduler_config
        self.boundary_timestep = boundary_timestep

    def encode(self, prompt: str) -> torch.Tensor:
        # Alone and padded to one length: what the encoder gives for a prompt never depends on another.
        tokens = self.tokenizer(
            [clean_prompt(prompt)],
            padding="max_length",
            max_length=MAX_TOKENS,
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        ).to(self.text_encoder.device)
        hidden_1LE = self.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        return hidden_1LE[0, : int(tokens.attention_mask.sum())]

    def latent_shape(self, *, width: int, height: int, num_frames: int) -> tuple[int, int, int, int]:
        spatial, temporal = self.vae.config.scale_factor_spatial, self.vae.config.scale_factor_temporal
        multiple = spatial * self.experts[0].patch[1]
        assert width % multiple == height % multiple == (num_frames - 1) % temporal == 0, (
            width,
            height,
            num_frames,
        )
        return self.vae.config.z_dim, (num_frames - 1) // temporal + 1, height // spatial, width // spatial

    def text_states(self, prompts: Sequence[torch.Tensor], *, expert: int) -> TextStates:
        padded = [_zero_padded(prompt_LE) for prompt_LE in prompts]
        return self.experts[expert].text_states(torch.stack(padded).to(self.text_encoder.device))

    def velocity(
        self, latents_BCTHW: torch.Tensor, *, timestep: torch.Tensor, text_states: TextStates, expert: int
    ) -> torch.Tensor:
        return self.experts[expert](latents_BCTHW, timestep=timestep, text_states=text_states).float()

    def decode(self, latents_1CTHW: torch.Tensor) -> torch.Tensor:
        latents_1CTHW = latents_1CTHW.to(self.vae.dtype)
        mean, std = (
            latents_1CTHW.new_tensor(values).view(1, -1, 1, 1, 1)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        video = self.vae.decode(latents_1CTHW / (1.0 / std) + mean, return_dict=False)[0]
        return (video[0].float() * 0.5 + 0.5).clamp(0, 1)


def _zero_padded(prompt_LE: torch.Tensor) -> torch.Tensor:
    # Wan was trained with zeros, unmasked, after the prompt.
    return torch.nn.functional.pad(prompt_LE, (0, 0, 0, MAX_TOKENS - len(prompt_LE)))


def load_wan(source: ModelSource, *, device: str, dtype: str, vae_dtype: str) -> WanModel:
    """Read a checkpoint's safetensors onto a device. dtype: of transformers and text encoder.

    Raises ModelError when a hub model's weights cannot be fetched.
    """
    folder = source.folder if source.hub_id is None else fetch_weights(source.hub_id, commit=source.revision)
    index = _read_json(folder / "model_index.json")
    scheduler_config = _read_json(folder / "scheduler" / "scheduler_config.json")
    boundary_ratio = index.get("boundary_ratio")
    names = ["transformer"] if boundary_ratio is None else ["transformer", "transformer_2"]
    _quieten()
    return WanModel(
        tokenizer=_load_tokenizer(folder),
        text_encoder=_load_text_encoder(folder, device, getattr(torch, dtype)),
        vae=_load_vae(folder, device, getattr(torch, vae_dtype)),
        experts=[_load_transformer(folder, name, device, getattr(torch, dtype)) for name in names],
        scheduler_config=scheduler_config,
        boundary_timestep=None
        if boundary_ratio is None
        else boundary_ratio * scheduler_config.get("num_train_timesteps", 1000),
    )


def _load_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)


def _load_text_encoder(folder: Path, device: str, dtype: torch.dtype) -> Any:
    # transformers took `dtype` later than our oldest supported one, diffusers warns of `torch_dtype`.
    return _on_device(UMT5EncoderModel, folder / "text_encoder", device, torch_dtype=dtype)


def _load_vae(folder: Path, device: str, dtype: torch.dtype) -> Any:
    return _on_device(AutoencoderKLWan, folder / "vae", device, dtype=dtype)


def _load_transformer(folder: Path, name: str, device: str, dtype: torch.dtype) -> WanTransformer:
    return WanTransformer(_on_device(WanTransformer3DModel, folder / name, device, dtype=dtype))


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
