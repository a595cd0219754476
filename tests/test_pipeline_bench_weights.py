"""Published configs, and modules drawn at random in place of a checkpoint's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5EncoderModel

from manifests.errors import OutOfDeviceMemory, UsageError
from pipeline.bench.weights import CheckpointWeights, RandomWeights
from pipeline.models import random_weights
from pipeline.models.random_weights import random_text_encoder, random_transformer, random_vae
from pipeline.models.shapes import PUBLISHED, TINY, shape_named


def equal_states(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    return all(
        values.dtype == states[1][name].dtype and torch.equal(values, states[1][name])
        for name, values in states[0].items()
    )


def test_a_random_transformer_is_what_a_checkpoint_with_its_weights_gives(tmp_path: Path) -> None:
    made = random_transformer(TINY.transformer, device="cpu", dtype=torch.bfloat16, seed=1)
    assert {parameter.dtype for parameter in made.parameters()} == {torch.bfloat16, torch.float32}
    made.save_pretrained(tmp_path)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert equal_states(made, loaded)
    assert made.dtype == loaded.dtype == torch.bfloat16
    for name, buffer in loaded.named_buffers():
        assert torch.equal(made.get_buffer(name), buffer)
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 4, 4, dtype=torch.bfloat16),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 8, 32, dtype=torch.bfloat16),
    }
    with torch.no_grad():
        outputs = [module(**inputs).sample for module in (made, loaded)]
    assert torch.equal(*outputs)
    assert outputs[0].isfinite().all()


def test_a_random_text_encoder_has_one_embedding(tmp_path: Path) -> None:
    made = random_text_encoder(TINY.text_encoder, device="cpu", dtype=torch.float32, seed=1)
    assert made.encoder.embed_tokens.weight.data_ptr() == made.shared.weight.data_ptr()
    made.save_pretrained(tmp_path)
    loaded = UMT5EncoderModel.from_pretrained(tmp_path)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        assert torch.equal(made(tokens).last_hidden_state, loaded(tokens).last_hidden_state)


def test_a_random_vae_decodes_to_more_than_its_bounds() -> None:
    made = random_vae(TINY.vae, device="cpu", seed=1)
    video = made.decode(torch.randn(1, 4, 2, 4, 4)).sample
    assert video.isfinite().all()
    assert (video.abs() < 1).float().mean() > 0.5


def test_every_call_gives_equal_weights_and_every_expert_its_own() -> None:
    weights = RandomWeights(TINY)
    first, again, second_expert = (
        weights.transformer(expert, device="cpu", dtype=torch.float32) for expert in (0, 0, 1)
    )
    assert equal_states(first, again)
    assert not equal_states(first, second_expert)


def test_checkpoint_weights_are_those_of_the_folder(tmp_path: Path) -> None:
    random_vae(TINY.vae, device="cpu", seed=1).half().save_pretrained(tmp_path / "vae")
    vae = CheckpointWeights(TINY, tmp_path).vae(device="cpu")
    assert vae.dtype == torch.float32
    assert equal_states(vae, AutoencoderKLWan.from_pretrained(tmp_path / "vae", dtype=torch.float32))


def test_weights_that_cannot_fit_are_told_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_weights, "_free_bytes", lambda device: 2**30)
    with pytest.raises(OutOfDeviceMemory, match=r"1\.0 GiB free, AutoencoderKLWan needs 2\.6 GiB"):
        random_vae(shape_named("Wan2.2-TI2V-5B").vae, device="cpu", seed=1)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Wan2.2-TI2V-5B", 5.00),
        ("Wan2.1-T2V-1.3B", 1.42),
        ("Wan2.1-T2V-14B", 14.29),
        ("Wan2.2-T2V-A14B", 14.29),
    ],
)
def test_published_transformers_have_their_size(name: str, billions: float) -> None:
    with torch.device("meta"):
        module = WanTransformer3DModel(**shape_named(name).transformer)
    assert sum(map(torch.numel, module.parameters())) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize("shape", PUBLISHED, ids=lambda shape: shape.name)
def test_a_published_shape_can_be_rendered_at_its_own_size(shape) -> None:
    assert shape.width % shape.patch_pixels == shape.height % shape.patch_pixels == 0
    assert (shape.num_frames - 1) % shape.temporal == 0
    assert len(shape.vae["latents_mean"]) == len(shape.vae["latents_std"]) == shape.vae["z_dim"]
    assert shape.transformer["in_channels"] == shape.vae["z_dim"]


def test_a_shape_is_found_in_any_case_and_an_unknown_one_names_the_others() -> None:
    assert shape_named("wan2.2-ti2v-5b").name == "Wan2.2-TI2V-5B"
    with pytest.raises(UsageError) as raised:
        shape_named("Wan3")
    assert all(shape.name in (raised.value.hint or "") for shape in PUBLISHED)
    assert "tiny" not in (raised.value.hint or "")
