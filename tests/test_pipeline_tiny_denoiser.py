"""The training's forwards are the networks' own."""

from __future__ import annotations

import pytest
import torch

from pipeline.models.text import MAX_TOKENS
from pipeline.models.tiny.denoiser import patchify, rope_tables, unpatchify, velocity
from pipeline.models.tiny.described import CAPTION_TOKENS
from pipeline.models.tiny.networks import (
    REAL,
    TOY,
    Sizes,
    make_text_encoder,
    make_tokenizer,
    make_transformer,
)
from pipeline.models.tiny.text_encoder import encode_text, relative_buckets
from pipeline.models.wan import padded
from pipeline.models.wan_transformer import WanTransformer

PROMPTS = ["A red circle moves left", "", "字 and a tiny blue square, seen from above " * 2]


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    """No weight of one and no bias of zero may hide a mistake."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return module


@pytest.mark.parametrize("sizes", [TOY, REAL], ids=["toy", "real"])
@torch.no_grad()
def test_text_and_velocity_are_what_the_engine_computes(sizes: Sizes) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    text_encoder = shaken(make_text_encoder(sizes, num_tokens=len(tokenizer)))
    transformer = shaken(make_transformer(sizes))
    tokens = tokenizer(PROMPTS, padding="max_length", max_length=MAX_TOKENS, return_tensors="pt")
    lengths = tokens.attention_mask.sum(1)
    assert lengths.max() <= CAPTION_TOKENS
    reference = text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    prompts = [hidden[:length] for hidden, length in zip(reference, lengths, strict=True)]

    text = encode_text(dict(text_encoder.named_parameters()), tokens.input_ids[:, :CAPTION_TOKENS], lengths)
    for row, prompt in zip(text, prompts, strict=True):
        assert (row[: len(prompt)] - prompt).abs().max() < 1e-4
        assert torch.count_nonzero(row[len(prompt) :]) == 0

    latents = torch.randn(len(PROMPTS), sizes.latent_channels, 3, 8, 12)
    timesteps = torch.tensor([999.0, 400.0, 1.0])
    patches = velocity(
        dict(transformer.named_parameters()),
        patchify(latents.permute(0, 2, 3, 4, 1)),
        timesteps,
        text,
        lengths,
        rope_tables(3, 8, 12, "cpu"),
    )
    trained = unpatchify(patches, frames=3, height=8, width=12).permute(0, 4, 1, 2, 3)
    engine = WanTransformer(transformer)
    tables = engine.step_tables(timesteps)
    for index, prompt in enumerate(prompts):
        (wanted,) = engine(
            latents[index : index + 1],
            blocks_L6D=tables.blocks_SL6D[index],
            head_2D=tables.head_S2D[index],
            texts=[engine.text_keys(*padded([prompt], device=latents.device))],
        )
        assert wanted.std() > 0.1
        assert (trained[index] - wanted[0]).abs().max() < 1e-4


def test_patches_are_put_together_as_they_were_taken_apart() -> None:
    latents = torch.randn(2, 3, 4, 6, 5)
    assert torch.equal(unpatchify(patchify(latents), frames=3, height=4, width=6), latents)


def test_relative_buckets_are_transformers_own() -> None:
    attention = make_text_encoder(TOY, num_tokens=9).encoder.block[0].layer[0].SelfAttention
    place = torch.arange(200)
    assert torch.equal(
        relative_buckets(200, "cpu"), attention._relative_position_bucket(place[None] - place[:, None])
    )
