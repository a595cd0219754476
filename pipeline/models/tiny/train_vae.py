"""First part: the VAE, on clips drawn as they are needed.

Shapes: B clips, T frames, H and W sides, Z latent channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pipeline.models.tiny import whole_clip
from pipeline.models.tiny.flat import Weights
from pipeline.models.tiny.networks import Sizes, make_vae
from pipeline.models.tiny.render import render
from pipeline.models.tiny.scenes import sample_scenes
from pipeline.models.tiny.state import Budget, State
from pipeline.models.tiny.training import Training

SEED = 11
TEST_SEED = 12
MAIN_SIZE = (64, 64)
OTHER_SIZES = ((96, 64), (64, 96), (96, 96))
_OTHER_EVERY = 8
_STEPS_DRAWN = 8  # at once: drawing costs a few hundred launches, however many clips

_FIRST_LOG_VARIANCE = -6.0
_EDGES, _SQUARES, _DIVERGENCE = 0.5, 2.0, 1e-4


def train_vae(
    state: State,
    budget: Budget,
    sizes: Sizes,
    *,
    device: str,
    batch: int = 32,
    num_test_clips: int = 256,
    extend: bool = False,
) -> None:
    """Writes `vae`: weights, and as facts the latents' mean and deviation and the PSNR on unseen clips."""
    torch.manual_seed(SEED)
    torch.backends.cudnn.benchmark = True
    vae = make_vae(sizes)
    with torch.no_grad():  # nearly noiseless at first: else the decoder learns to ignore its input
        vae.quant_conv.bias[sizes.latent_channels :] = _FIRST_LOG_VARIANCE
    training = Training(
        state,
        "vae",
        dict(vae.named_parameters()),
        budget=budget,
        device=device,
        learning_rate=1e-3,
        average_decay=0.998,
        extend=extend,
    )
    if training.is_finished:
        state.log("vae is finished")
        return
    clips = _Clips(batch, device, training.dtype)
    fused = compiled_taps(device)
    draw = torch.Generator(device)

    def inputs_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        video_BTHW3 = clips.of_step(step)
        draw.manual_seed(step)
        shape = whole_clip.latent_shape(video_BTHW3.shape, sizes.latent_channels)
        return video_BTHW3, torch.randn(shape, generator=draw, device=device)

    def loss_of(
        weights: dict[str, torch.Tensor], video_BTHW3: torch.Tensor, noise_BTHWZ: torch.Tensor
    ) -> torch.Tensor:
        is_main = video_BTHW3.shape[2:4] == MAIN_SIZE  # the others are not worth compiling for
        return vae_loss(weights, video_BTHW3, noise_BTHWZ, fused if is_main else None)

    def measured() -> dict[str, Any]:
        facts = vae_facts(training.averaged(), device, num_clips=num_test_clips)
        state.log(f"vae {facts}")
        return facts

    training.run(inputs_of, loss_of, keep=measured)


def vae_loss(
    weights: Weights,
    video_BTHW3: torch.Tensor,
    noise_BTHWZ: torch.Tensor,
    normed_taps: whole_clip.NormedTaps | None,
) -> torch.Tensor:
    """Absolute and squared error, absolute error of differences in space and time, and a tiny KL term."""
    posterior = whole_clip.encode(weights, video_BTHW3, normed_taps).float()
    mean, log_variance = posterior.chunk(2, dim=-1)
    log_variance = log_variance.clamp(-30, 20)
    latents = mean + (0.5 * log_variance).exp() * noise_BTHWZ
    rebuilt = whole_clip.decode(weights, latents.to(video_BTHW3.dtype), normed_taps).float()
    error = rebuilt - video_BTHW3.float()
    edges = sum(error.diff(dim=axis).abs().mean() for axis in (1, 2, 3))
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return error.abs().mean() + _SQUARES * error.square().mean() + _EDGES * edges + _DIVERGENCE * divergence


def compiled_taps(device: str) -> whole_clip.NormedTaps | None:
    """Norm, activation and stacking as one kernel each way, on a card."""
    if device == "cpu":
        return None
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(whole_clip.normed_taps, dynamic=False)


class _Clips:
    """The clips of every step, in [-1, 1], whichever step comes first: one in eight of another size."""

    def __init__(self, batch: int, device: str, dtype: torch.dtype) -> None:
        self.batch = batch
        self.device = device
        self.dtype = dtype
        self._main: tuple[int, torch.Tensor] | None = None

    def of_step(self, step: int) -> torch.Tensor:
        if step % _OTHER_EVERY == _OTHER_EVERY - 1:
            width, height = OTHER_SIZES[step // _OTHER_EVERY % len(OTHER_SIZES)]
            return self._draw(step, self.batch // 2, width, height)
        chunk, index = divmod(step, _STEPS_DRAWN)
        if self._main is None or self._main[0] != chunk:
            self._main = chunk, self._draw(chunk, self.batch * _STEPS_DRAWN, *MAIN_SIZE)
        return self._main[1][index * self.batch : (index + 1) * self.batch]

    def _draw(self, number: int, num_clips: int, width: int, height: int) -> torch.Tensor:
        rng = np.random.default_rng([SEED, number, width, height])
        video = render(sample_scenes(rng, num_clips, width=width, height=height), device=self.device)
        return (video * 2 - 1).to(self.dtype)


def vae_facts(weights: Weights, device: str, *, num_clips: int) -> dict[str, Any]:
    """Measured as the weights will ship, in half precision: the latents' statistics and the PSNR."""
    shipped = {name: tensor.half().float() for name, tensor in weights.items()}
    scenes = sample_scenes(np.random.default_rng(TEST_SEED), num_clips, width=64, height=64)
    video = render(scenes, device=device)
    means, squares = [], []
    with torch.no_grad():
        for clips in video.split(32):
            latents = whole_clip.encode(shipped, clips * 2 - 1).chunk(2, dim=-1)[0]
            rebuilt = (whole_clip.decode(shipped, latents) / 2 + 0.5).clamp(0, 1)
            means.append(latents.flatten(0, -2))
            squares.append((rebuilt - clips).square().mean(dim=(1, 2, 3, 4)))
    latents = torch.cat(means)
    errors = torch.cat(squares)
    return {
        "latents_mean": latents.mean(0).tolist(),
        "latents_std": latents.std(0).tolist(),
        "psnr_db": round(-10 * errors.mean().log10().item(), 2),
        "psnr_of_worst_decile_db": round(-10 * errors.quantile(0.9).log10().item(), 2),
    }
