"""Models of a given config with random weights, made on the device itself: no download, no copy on the CPU.

Neither time nor memory of a model depends on the values of its weights, as long as they stay finite: every
matrix is drawn so that it keeps its input's scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from manifests.errors import OutOfDeviceMemory

_BIAS_STD = 0.02


def random_transformer(
    config: Mapping[str, Any], *, device: str, dtype: torch.dtype, seed: int
) -> WanTransformer3DModel:
    """In the dtypes that `from_pretrained(dtype=...)` gives: some modules stay in fp32. OutOfDeviceMemory."""
    with torch.device("meta"):
        module = WanTransformer3DModel(**config)
    kept_in_fp32 = set(WanTransformer3DModel._keep_in_fp32_modules)
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if kept_in_fp32 & set(name.split(".")) else dtype)
    _allocate(module, device)
    # The rotary tables are computed at construction and in no checkpoint: on the meta device they got lost.
    settings = module.config
    rope = WanRotaryPosEmbed(settings.attention_head_dim, settings.patch_size, settings.rope_max_seq_len)
    module.rope = rope.to(device)
    _draw_all(module, device, seed)
    _check_buffers(module, rebuilt=("rope.freqs_cos", "rope.freqs_sin"))
    return module


def random_vae(config: Mapping[str, Any], *, device: str, seed: int) -> AutoencoderKLWan:
    """In fp32, as published. Raises OutOfDeviceMemory."""
    with torch.device("meta"):
        module = AutoencoderKLWan(**config)
    _allocate(module, device)
    _draw_all(module, device, seed)
    _check_buffers(module)
    return module


def random_text_encoder(
    config: Mapping[str, Any], *, device: str, dtype: torch.dtype, seed: int
) -> UMT5EncoderModel:
    """Raises OutOfDeviceMemory."""
    with torch.device("meta"):
        module = UMT5EncoderModel(UMT5Config(**config)).to(dtype)
    _allocate(module, device)
    module.tie_weights()  # its two names of the embedding were parted on the way
    _draw_all(module, device, seed)
    _check_buffers(module)
    return module


def _allocate(module: torch.nn.Module, device: str) -> None:
    """From the meta device to a real one, values to come."""
    needed, free = sum(parameter.nbytes for parameter in module.parameters()), _free_bytes(device)
    if needed > free:
        raise OutOfDeviceMemory(
            f"{device} has {free / 2**30:.1f} GiB free, {type(module).__name__} needs "
            f"{needed / 2**30:.1f} GiB for its weights alone",
            hint="end what else holds the device's memory, or bench a smaller shape",
        )
    module.to_empty(device=device)


def _free_bytes(device: str) -> int:
    if device == "cpu":
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _draw_all(module: torch.nn.Module, device: str, seed: int) -> None:
    module.eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in module.named_parameters():
        _draw(name, parameter, generator)


def _draw(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith("gamma") or (name.endswith("weight") and parameter.ndim == 1):  # of a norm
        parameter.fill_(1.0)
    elif name.endswith("bias") and parameter.ndim == 1:
        parameter.normal_(0.0, _BIAS_STD, generator=generator)
    else:
        fan_in = parameter.numel() // parameter.shape[0]
        parameter.normal_(0.0, fan_in**-0.5, generator=generator)


def _check_buffers(module: torch.nn.Module, *, rebuilt: tuple[str, ...] = ()) -> None:
    # A newer diffusers may add one, which would hold whatever lay in that memory before.
    names = tuple(name for name, _ in module.named_buffers())
    assert names == rebuilt, names
