"""Wan2.1's VAE over a whole clip at once, from the weights of a diffusers AutoencoderKLWan.

diffusers encodes four frames and decodes one latent frame at a time, with caches between: hundreds of tiny
launches. The same numbers come from one pass, as every convolution looks back only; the first frame alone is
never resampled in time. A convolution over three frames runs as a 2D one over their stacked channels: cuDNN's
2D kernels are the faster ones, most of all with few channels.

Shapes: B clips, T frames (of pictures or of latents), H and W sides, C channels, which are last in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from pipeline.models.tiny.flat import Weights

# x_BTHWC and the norm's gamma to the three frames' stacked channels: a compiled version can stand in for it.
NormedTaps = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def latent_shape(video_shape: torch.Size, latent_channels: int) -> tuple[int, int, int, int, int]:
    """(B, T', H/8, W/8, Z) of a video's latents."""
    batch, frames, height, width, _ = video_shape
    return batch, (frames - 1) // 4 + 1, height // 8, width // 8, latent_channels


def encode(
    weights: Weights, video_BTHW3: torch.Tensor, normed_taps: NormedTaps | None = None
) -> torch.Tensor:
    """RGB in [-1, 1] to the posterior's mean and log variance, (B, T', H/8, W/8, 2Z). T = 4k + 1."""
    run = _Run(weights, "encoder", normed_taps)
    x = run.conv("conv_in", taps(video_BTHW3))
    for name in run.numbered("down_blocks"):
        x = run.residual(name, x) if f"{name}.conv1.weight" in run else run.downsample(name, x)
    x = run.middle(x)
    x = run.conv("conv_out", run.normed("norm_out", x))
    return _pointwise(x, weights["quant_conv.weight"], weights["quant_conv.bias"])


def decode(
    weights: Weights, latents_BTHWZ: torch.Tensor, normed_taps: NormedTaps | None = None
) -> torch.Tensor:
    """Latents, not normalised, to RGB, (B, 4T - 3, 8H, 8W, 3), not clamped."""
    run = _Run(weights, "decoder", normed_taps)
    x = _pointwise(latents_BTHWZ, weights["post_quant_conv.weight"], weights["post_quant_conv.bias"])
    x = run.middle(run.conv("conv_in", taps(x)))
    for block in run.numbered("up_blocks"):
        for name in run.numbered(f"{block}.resnets"):
            x = run.residual(name, x)
        for name in run.numbered(f"{block}.upsamplers"):
            x = run.upsample(name, x)
    return run.conv("conv_out", run.normed("norm_out", x))


def taps(x_BTHWC: torch.Tensor) -> torch.Tensor:
    """Each frame with the two before it, zeros before the first: (B, T, H, W, 3C)."""
    padded = F.pad(x_BTHWC, (0, 0, 0, 0, 0, 0, 2, 0))
    num_frames = x_BTHWC.shape[1]
    return torch.cat([padded[:, start : start + num_frames] for start in range(3)], dim=-1)


def normed_taps(x_BTHWC: torch.Tensor, gamma_C: torch.Tensor) -> torch.Tensor:
    """Norm over the channels, SiLU, then `taps`."""
    return taps(F.silu(rms_norm(x_BTHWC, gamma_C)))


def rms_norm(x: torch.Tensor, gamma_C: torch.Tensor) -> torch.Tensor:
    """x over its root mean square across the last axis, computed in fp32."""
    # An epsilon below fp32's normal range would round to zero: zeros must stay zeros, as with F.normalize.
    return F.rms_norm(x.float(), x.shape[-1:], gamma_C.float(), 1e-24).to(x.dtype)


class _Run:
    """One pass through the encoder or the decoder. Names are diffusers' own."""

    def __init__(self, weights: Weights, part: str, normed_taps_: NormedTaps | None) -> None:
        self.weights = weights
        self.part = part
        self.normed_taps = normed_taps_ or normed_taps

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[f"{self.part}.{name}"]

    def __contains__(self, name: str) -> bool:
        return f"{self.part}.{name}" in self.weights

    def numbered(self, folder: str) -> list[str]:
        """The modules of a list, in its order."""
        prefix = f"{self.part}.{folder}."
        numbers = {
            name.removeprefix(prefix).split(".")[0] for name in self.weights if name.startswith(prefix)
        }
        return [f"{folder}.{number}" for number in sorted(numbers, key=int)]

    def normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.normed_taps(x, self[f"{name}.gamma"].flatten())

    def conv(self, name: str, taps_BTHWC: torch.Tensor) -> torch.Tensor:
        """A causal 3x3x3 convolution of stacked frames."""
        kernel = self[f"{name}.weight"]  # out, in, 3 frames, 3, 3
        stacked = kernel.transpose(1, 2).flatten(1, 2)
        return _conv2d(taps_BTHWC, stacked, self[f"{name}.bias"], padding=1)

    def residual(self, name: str, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        if f"{name}.conv_shortcut.weight" in self:
            shortcut = _pointwise(x, self[f"{name}.conv_shortcut.weight"], self[f"{name}.conv_shortcut.bias"])
        x = self.conv(f"{name}.conv1", self.normed(f"{name}.norm1", x))
        x = self.conv(f"{name}.conv2", self.normed(f"{name}.norm2", x))
        return x + shortcut

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        x = self.residual("mid_block.resnets.0", x)
        x = self._attention("mid_block.attentions.0", x)
        return self.residual("mid_block.resnets.1", x)

    def _attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Within each frame, one head."""
        normed = rms_norm(x, self[f"{name}.norm.gamma"].flatten())
        qkv = _pointwise(normed, self[f"{name}.to_qkv.weight"], self[f"{name}.to_qkv.bias"])
        queries, keys, values = qkv.flatten(0, 1).flatten(1, 2).unsqueeze(1).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        mixed = mixed.squeeze(1).reshape(x.shape)
        return x + _pointwise(mixed, self[f"{name}.proj.weight"], self[f"{name}.proj.bias"])

    def downsample(self, name: str, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (0, 0, 0, 1, 0, 1))
        x = _conv2d(x, self[f"{name}.resample.1.weight"], self[f"{name}.resample.1.bias"], stride=2)
        if f"{name}.time_conv.weight" not in self or x.shape[1] == 1:
            return x
        frames = torch.cat([x[:, :-2:2], x[:, 1:-1:2], x[:, 2::2]], dim=-1)
        return torch.cat([x[:, :1], self._over_time(name, frames)], dim=1)

    def upsample(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if f"{name}.time_conv.weight" in self and x.shape[1] > 1:
            doubled = self._over_time(name, taps(x[:, 1:]))
            pairs = doubled.unflatten(-1, (2, -1)).movedim(-2, 2).flatten(1, 2)
            x = torch.cat([x[:, :1], pairs], dim=1)
        x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
        return _conv2d(x, self[f"{name}.resample.1.weight"], self[f"{name}.resample.1.bias"], padding=1)

    def _over_time(self, name: str, taps_BTHWC: torch.Tensor) -> torch.Tensor:
        """A convolution over three frames alone: a matrix product."""
        kernel = self[f"{name}.time_conv.weight"].flatten(2)  # out, in, 3 frames
        return F.linear(taps_BTHWC, kernel.transpose(1, 2).flatten(1), self[f"{name}.time_conv.bias"])


def _conv2d(
    x_BTHWC: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor, *, stride: int = 1, padding: int = 0
) -> torch.Tensor:
    pictures = x_BTHWC.flatten(0, 1).permute(0, 3, 1, 2)  # channels-last in memory
    kernel = kernel.contiguous(memory_format=torch.channels_last)
    out = F.conv2d(pictures, kernel, bias, stride=stride, padding=padding)
    return out.permute(0, 2, 3, 1).unflatten(0, x_BTHWC.shape[:2])


def _pointwise(x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, kernel.flatten(1), bias)
