"""One forward against the diffusers module it shares its weights with."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from pipeline.models import wan_block
from pipeline.models.wan_transformer import WanTransformer

LATENTS = (2, 4, 3, 6, 10)  # clips, channels, frames, height, width: odd numbers of tokens


def make_module(**settings: Any) -> Any:
    torch.manual_seed(11)
    module = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=3,
        rope_max_seq_len=32,
        **settings,
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval().requires_grad_(False)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    latents = torch.randn(LATENTS, generator=generator)
    text = torch.randn((2, 21, 16), generator=generator)
    return latents, text, torch.tensor(713)


def ours(module: Any) -> torch.Tensor:
    return forward(WanTransformer(module))


def forward(transformer: WanTransformer) -> torch.Tensor:
    device = transformer.module.patch_embedding.weight.device
    latents, text, timestep = (tensor.to(device) for tensor in inputs())
    keys = transformer.text_keys(text, torch.full((2,), text.shape[1], dtype=torch.int32, device=device))
    tables = transformer.step_tables(timestep[None])
    (velocity,) = transformer(
        latents, blocks_L6D=tables.blocks_SL6D[0], head_2D=tables.head_S2D[0], texts=[keys]
    )
    return velocity


def theirs(module: Any, *, per_token: bool = False) -> torch.Tensor:
    latents, text, timestep = inputs()
    dtype = module.patch_embedding.weight.dtype
    num_tokens = LATENTS[2] * (LATENTS[3] // 2) * (LATENTS[4] // 2)
    timesteps = timestep.expand(2, num_tokens) if per_token else timestep.expand(2)
    return module(latents.to(dtype), timesteps, text.to(dtype), return_dict=False)[0]


@pytest.mark.parametrize("settings", [{}, {"cross_attn_norm": False}, {"eps": 0.5}], ids=str)
def test_a_forward_agrees_with_diffusers(settings: dict[str, Any]) -> None:
    module = make_module(**settings)
    expected = theirs(module)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(module), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_one_timestep_for_all_tokens_is_the_per_token_table_folded() -> None:
    module = make_module()
    expected = theirs(module, per_token=True)
    torch.testing.assert_close(ours(module), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_in_bfloat16_it_is_no_further_from_float32_than_diffusers_is(tmp_path: Path) -> None:
    module = make_module()
    truth = theirs(module)
    module.save_pretrained(tmp_path)
    half = WanTransformer3DModel.from_pretrained(tmp_path, dtype=torch.bfloat16, local_files_only=True)
    assert half.patch_embedding.weight.dtype == torch.bfloat16
    with torch.no_grad():
        error = (ours(half).float() - truth).square().mean().sqrt()
        allowed = (theirs(half).float() - truth).square().mean().sqrt()
    assert error <= 1.1 * allowed


def test_text_keys_of_a_prompt_do_not_depend_on_its_neighbours() -> None:
    transformer = WanTransformer(make_module())
    _, text, _ = inputs()
    counts = torch.tensor([21, 21], dtype=torch.int32)
    for together, alone in zip(
        transformer.text_keys(text, counts), transformer.text_keys(text[1:], counts[1:]), strict=True
    ):
        torch.testing.assert_close(together.k_BMHK[1:], alone.k_BMHK, rtol=0, atol=1e-5)
        torch.testing.assert_close(together.v_BMHK[1:], alone.v_BMHK, rtol=0, atol=1e-5)


def test_rows_of_queries_behind_the_clips_own_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_module()
    latents, text, timestep = inputs()
    transformer = WanTransformer(module)
    keys = transformer.text_keys(text[:1], torch.tensor([21], dtype=torch.int32))
    tables = transformer.step_tables(timestep[None])

    def velocity() -> torch.Tensor:
        with torch.inference_mode():
            return transformer(
                latents[:1], blocks_L6D=tables.blocks_SL6D[0], head_2D=tables.head_S2D[0], texts=[keys]
            )[0]

    expected = velocity()
    monkeypatch.setattr(wan_block, "query_rows", lambda num_queries, *, backend: num_queries + 5)
    torch.testing.assert_close(velocity(), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_what_a_block_has_read_is_gone_when_its_feed_forward_needs_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two branches one has yet to be read while the first is in its feed-forward layer, then none."""
    transformer = WanTransformer(make_module())
    latents, text, timestep = inputs()
    counts = torch.tensor([21, 13], dtype=torch.int32)
    keys = [transformer.text_keys(text, counts) for _ in range(2)]
    tables = transformer.step_tables(timestep[None])
    attend, linear_gelu = wan_block.WanBlock.attend, wan_block.linear_gelu
    read: list[weakref.ref[torch.Tensor]] = []
    num_alive: list[int] = []

    def noted_attend(self: wan_block.WanBlock, *arguments: Any) -> torch.Tensor:
        normed_BND = attend(self, *arguments)
        read.append(weakref.ref(normed_BND))
        return normed_BND

    def noted_linear_gelu(*arguments: torch.Tensor) -> torch.Tensor:
        num_alive.append(sum(reference() is not None for reference in read))
        return linear_gelu(*arguments)

    monkeypatch.setattr(wan_block.WanBlock, "attend", noted_attend)
    monkeypatch.setattr(wan_block, "linear_gelu", noted_linear_gelu)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # from now on calls keep their arguments
    transformer(latents, blocks_L6D=tables.blocks_SL6D[0], head_2D=tables.head_S2D[0], texts=keys)
    assert num_alive[2:] == [1, 0] * (len(transformer.blocks) - 1)


def test_another_prompts_keys_take_the_room_of_the_last_ones() -> None:
    transformer = WanTransformer(make_module())
    _, text, _ = inputs()
    counts = torch.tensor([21, 13], dtype=torch.int32)
    kept = transformer.text_keys(text, counts)
    places = [keys.k_BMHK.data_ptr() for keys in kept]
    renewed = transformer.text_keys(text.flip(0), counts.flip(0), into=kept)
    assert [keys.k_BMHK.data_ptr() for keys in renewed] == places
    for keys, fresh in zip(renewed, transformer.text_keys(text.flip(0), counts.flip(0)), strict=True):
        assert torch.equal(keys.k_BMHK, fresh.k_BMHK)
        assert torch.equal(keys.v_BMHK, fresh.v_BMHK)
        assert torch.equal(keys.counts_B, fresh.counts_B)


def test_it_computes_with_the_modules_own_weights() -> None:
    module = make_module()
    transformer = WanTransformer(module)
    for parameter in module.parameters():
        parameter.mul_(0.9)
    expected = theirs(module)
    torch.testing.assert_close(
        forward(transformer), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
    )
