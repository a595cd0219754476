"""Second part: the transformer and the text encoder, jointly, by rectified flow on banked latents.

Liu, Gong and Liu 2022, "Flow Straight and Fast"; as Wan uses it: x = (1 - sigma) data + sigma noise, the
target is noise - data, the timestep 1000 sigma, and sigma is shifted as in sampling.

Shapes: B clips, N tokens of P numbers, L text tokens, E text channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from pipeline.kernels.qk_norm_rope import Rope
from pipeline.models.tiny.bank import Bank, LatentCode, Size, fill_banks
from pipeline.models.tiny.denoiser import Block, compiled_block, rope_tables, velocity
from pipeline.models.tiny.described import CAPTION_TOKENS, tokenize
from pipeline.models.tiny.flat import Weights, part_of, prefixed
from pipeline.models.tiny.networks import Sizes, make_text_encoder, make_tokenizer, make_transformer
from pipeline.models.tiny.state import Budget, Minutes, State
from pipeline.models.tiny.text_encoder import encode_text
from pipeline.models.tiny.training import Training

SEED = 21
FLOW_SHIFT = 3.0
DROPPED_FRAC = 0.1
BANK_SIZES = (
    Size(width=64, height=64, num_clips=131_072),
    Size(width=96, height=64, num_clips=32_768),
    Size(width=64, height=96, num_clips=32_768),
    Size(width=96, height=96, num_clips=16_384),
)
_BANK_TIME_FRAC = 0.15
_CAPTIONS = 3
_CLIPS_PER_ORDER = 2048

# (bank, latent frames) of the steps in turn. Three latent frames are the first nine of a clip: the VAE looks
# back only, so the beginning of a clip's latents are the latents of its beginning.
_TURNS = [(0, 5), (0, 5), (1, 5), (0, 5), (0, 5), (2, 5), (0, 5), (0, 5), (0, 3), (0, 5)]
_TURNS += [(0, 5), (0, 5), (1, 5), (0, 5), (0, 5), (2, 5), (0, 5), (3, 5), (1, 3), (2, 3)]


class Batch(NamedTuple):
    """Clean patches with their captions, some of them dropped, and the noise of each, from 0 to 1 as much."""

    patches_BNP: torch.Tensor
    ids_BL: torch.Tensor
    lengths_B: torch.Tensor
    noise_BNP: torch.Tensor
    sigma_B: torch.Tensor


def train_denoiser(
    state: State,
    budget: Budget,
    sizes: Sizes,
    *,
    device: str,
    batch: int = 1024,
    bank_sizes: Sequence[Size] = BANK_SIZES,
    extend: bool = False,
) -> None:
    """Writes `denoiser`: weights named `transformer.` and `text_encoder.`. Needs `vae`."""
    torch.manual_seed(SEED)
    tokenizer = tokenizer_file(state)
    training = Training(
        state,
        "denoiser",
        initial_weights(sizes),
        budget=budget,
        device=device,
        learning_rate=1e-3,
        average_decay=0.9995,
        extend=extend,
    )
    if training.is_finished:
        state.log("denoiser is finished")
        return
    banks = fill_banks(
        bank_sizes,
        latent_code(state, device, training.dtype),
        seed=SEED,
        tokenizer=tokenizer,
        num_captions=_CAPTIONS,
        clips_per_order=_CLIPS_PER_ORDER,
        device=device,
        is_late=lambda: isinstance(budget, Minutes) and budget.used_s > 60 * budget.minutes * _BANK_TIME_FRAC,
    )
    state.log(f"banks of {[len(bank) for bank in banks]} clips")
    draw = torch.Generator(device)
    empty = empty_caption(tokenizer, device)
    block = compiled_block(device)

    def inputs_of(step: int) -> tuple[torch.Tensor, ...]:
        draw.manual_seed(step)
        number, frames = _TURNS[step % len(_TURNS)]
        bank = banks[number]
        clips = draw_batch(bank, frames, batch, draw, empty)
        return *clips, *rope_tables(frames, bank.height, bank.width, device)

    def loss_of(weights: dict[str, torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        *clips, cos_N1R, sin_N1R = inputs
        return flow_loss(weights, Batch(*clips), (cos_N1R, sin_N1R), block)

    training.run(inputs_of, loss_of)


def flow_loss(weights: Weights, batch: Batch, rope: Rope, block: Block | None) -> torch.Tensor:
    """Mean squared error of the velocity at one noise level a clip."""
    data = batch.patches_BNP.float()
    noisy = torch.lerp(data, batch.noise_BNP, batch.sigma_B[:, None, None])
    text = encode_text(part_of(weights, "text_encoder."), batch.ids_BL, batch.lengths_B)
    predicted = velocity(
        part_of(weights, "transformer."), noisy, 1000 * batch.sigma_B, text, batch.lengths_B, rope, block
    )
    return (predicted - (batch.noise_BNP - data)).square().mean()


def draw_batch(
    bank: Bank, frames: int, batch: int, draw: torch.Generator, empty: tuple[torch.Tensor, torch.Tensor]
) -> Batch:
    """About as many tokens as `batch` clips of 80; one caption in ten is empty."""
    device = bank.patches_MNP.device
    num_tokens = frames * bank.height * bank.width // 4
    num_clips = min(batch, max(8, batch * 80 // num_tokens // 8 * 8))
    clips = torch.randint(len(bank), (num_clips,), generator=draw, device=device)
    which = torch.randint(bank.ids_MCL.shape[1], (num_clips,), generator=draw, device=device)
    dropped = torch.rand(num_clips, generator=draw, device=device) < DROPPED_FRAC
    ids, length = empty
    patches_BNP = bank.patches_MNP[clips, :num_tokens]
    even = torch.rand(num_clips, generator=draw, device=device)
    return Batch(
        patches_BNP=patches_BNP,
        ids_BL=torch.where(dropped[:, None], ids, bank.ids_MCL[clips, which].long()),
        lengths_B=torch.where(dropped, length, bank.lengths_MC[clips, which].long()),
        noise_BNP=torch.randn(patches_BNP.shape, generator=draw, device=device),
        sigma_B=FLOW_SHIFT * even / (1 + (FLOW_SHIFT - 1) * even),
    )


def initial_weights(sizes: Sizes) -> dict[str, torch.Tensor]:
    transformer = dict(make_transformer(sizes).named_parameters())
    text_encoder = dict(make_text_encoder(sizes, num_tokens=len(make_tokenizer())).named_parameters())
    return prefixed(transformer, "transformer.") | prefixed(text_encoder, "text_encoder.")


def latent_code(state: State, device: str, dtype: torch.dtype) -> LatentCode:
    weights, facts = state.result("vae")
    mean, std = (torch.tensor(facts[name], device=device) for name in ("latents_mean", "latents_std"))
    on_device = {name: tensor.to(device, dtype) for name, tensor in weights.items()}
    return LatentCode(weights=on_device, mean=mean, std=std)


def tokenizer_file(state: State) -> Path:
    """Written again in every part: it follows from the code alone."""
    file = state.folder / "tokenizer.json"
    make_tokenizer().backend_tokenizer.save(str(file))
    return file


def empty_caption(tokenizer: Path, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Its token numbers (L,) and its length, a scalar."""
    ids, lengths = tokenize([""], tokenizer)
    assert ids.shape == (1, CAPTION_TOKENS)
    return torch.from_numpy(ids[0]).long().to(device), torch.tensor(int(lengths[0]), device=device)
