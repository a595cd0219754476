"""Operations from shapes against torch's own counter over diffusers' forwards."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeline.bench.operations import decode_operations, forward_operations, guided_operations
from pipeline.models.random_weights import random_transformer, random_vae
from pipeline.models.shapes import TINY, shape_named

LATENTS = (4, 3, 6, 10)
TOKENS = 3 * 3 * 5
TEXT_ROWS = 512
TINY_21_VAE = shape_named("Wan2.1-T2V-1.3B").vae | {
    "base_dim": 4,
    "z_dim": 4,
    "num_res_blocks": 1,
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}


def counted(call: Any) -> dict[str, Counter[str]]:
    """Operations by module and by operator; attention as its two products, as the counter knows no other."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return {
        module: Counter({str(operator): count for operator, count in counts.items()})
        for module, counts in counter.get_flop_counts().items()
    }


def count_forward(timestep: torch.Tensor) -> dict[str, Counter[str]]:
    module = random_transformer(TINY.transformer, device="cpu", dtype=torch.float32, seed=1)
    return counted(
        lambda: module(
            hidden_states=torch.randn(1, *LATENTS),
            timestep=timestep,
            encoder_hidden_states=torch.randn(1, TEXT_ROWS, TINY.transformer["text_dim"]),
        )
    )


def attention_of(counts: dict[str, Counter[str]], name: str) -> int:
    return sum(own["aten.bmm"] for module, own in counts.items() if module.endswith(name))


@pytest.mark.parametrize("time_rows", [1, TOKENS])
def test_a_forward_counts_what_diffusers_does(time_rows: int) -> None:
    timestep = torch.full((1,), 757) if time_rows == 1 else torch.full((1, time_rows), 757)
    counts = count_forward(timestep)
    operations = forward_operations(
        TINY.transformer,
        latent_shape_CTHW=LATENTS,
        text_keys=TEXT_ROWS,
        text_rows=TEXT_ROWS,
        time_rows=time_rows,
    )
    assert operations.self_attention == attention_of(counts, ".attn1")
    assert operations.cross_attention == attention_of(counts, ".attn2")
    assert operations.total == counts["Global"].total()


def test_half_a_guided_step_leaves_out_half_of_what_both_branches_share() -> None:
    counts = count_forward(torch.full((1,), 757))
    shared = sum(
        own.total()
        for module, own in counts.items()
        if module.endswith((".patch_embedding", ".blocks.0.attn1"))
        and not module.endswith("blocks.0.attn1.to_q")
    )
    whole = forward_operations(TINY.transformer, latent_shape_CTHW=LATENTS, text_keys=97)
    half = guided_operations(TINY.transformer, latent_shape_CTHW=LATENTS, text_keys=97)
    assert whole.total - half.total == shared / 2


@pytest.mark.parametrize("vae", [TINY.vae, TINY_21_VAE], ids=["residual", "plain"])
@pytest.mark.parametrize("frames", [1, 2, 4])
def test_a_decode_counts_what_diffusers_does(vae: dict[str, Any], frames: int) -> None:
    module = random_vae(vae, device="cpu", seed=1)
    shape = (4, frames, 3, 5)
    counts = counted(lambda: module.decode(torch.randn(1, *shape)))
    assert decode_operations(vae, latent_shape_CTHW=shape) == counts["Global"].total()


@pytest.mark.parametrize(
    ("name", "size", "peta_operations"),
    [("Wan2.2-TI2V-5B", (1344, 768, 121), 0.638), ("Wan2.1-T2V-1.3B", (832, 480, 81), 0.283)],
)
def test_published_shapes_need_what_is_known_of_them(
    name: str, size: tuple[int, int, int], peta_operations: float
) -> None:
    shape = shape_named(name)
    latents = shape.latent_shape(width=size[0], height=size[1], num_frames=size[2])
    forward = forward_operations(
        shape.transformer, latent_shape_CTHW=latents, text_keys=512, text_rows=512, time_rows=1
    )
    assert forward.total / 1e15 == pytest.approx(peta_operations, rel=1e-3)
