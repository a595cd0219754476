"""Few-step weights: recipes as they are written, their samplers, and preset `turbo`."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from manifests.errors import ModelError
from manifests.job import Weights
from pipeline.config import EngineConfig
from pipeline.engine import build_engine
from pipeline.models.lora_files import find_lora
from pipeline.models.resolve import resolve_model
from pipeline.sampling.few_step import EulerSteps, RenoisingSteps, step_seed
from pipeline.sampling.noise import initial_noise
from pipeline.sampling.recipes import FILE_NAME, parse_recipe, published_recipe, read_recipe
from pipeline.sampling.samplers import boundary_timestep
from tests.pipeline_checkpoints import build_checkpoint, make_batch, make_job

SHAPE = (3, 2, 4, 5)
LEVELS = (1.0, 0.757, 0.522)


def velocity(latents: torch.Tensor, sigma: float) -> torch.Tensor:
    return 0.8 * (1.3 * latents).sin() + sigma * latents


# ---- recipes ----------------------------------------------------------------------------------------


def test_published_recipes_are_found_by_repository_in_any_case() -> None:
    fast = published_recipe("fastvideo/fastwan2.2-ti2v-5b-fullattn-diffusers")
    assert fast is not None
    assert (fast.sampler, fast.steps, fast.sigmas) == ("renoise", 3, LEVELS)
    assert published_recipe("Wan-AI/Wan2.2-TI2V-5B-Diffusers") is None


def test_a_table_of_indices_and_its_shifted_timesteps_are_one_schedule() -> None:
    by_index = published_recipe("lightx2v/Wan2.1-Distill-Loras")
    by_timestep = published_recipe("lightx2v/Wan2.2-Lightning")
    assert by_index is not None
    assert by_timestep is not None
    assert by_index.sigmas == pytest.approx(by_timestep.sigmas)
    assert by_index.sigmas == pytest.approx([1.0, 15 / 16, 5 / 6, 5 / 8])


def test_a_recipe_may_move_where_the_second_expert_takes_over() -> None:
    lightning, fast = (
        published_recipe("lightx2v/Wan2.2-Lightning"),
        published_recipe("lightx2v/Wan2.1-Distill-Loras"),
    )
    assert boundary_timestep({}, 900.0, lightning) == 875.0
    assert boundary_timestep({}, 900.0, fast) == 900.0
    assert boundary_timestep({}, 900.0, None) == 900.0
    assert boundary_timestep({}, None, lightning) is None


EULER = {"name": "a", "sampler": "euler", "sigmas": [1, 0.5]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepz": 3}, "stepz in few_step.toml: 3"),
        ({"sampler": "ddim"}, "sampler in few_step.toml: 'ddim'"),
        ({"name": None}, "no name in"),
        ({"sampler": None}, "no sampler in"),
        ({"sigmas": None}, "no steps for sampler euler"),
        ({"timesteps": [1000]}, "timesteps and sigmas for sampler euler"),
        ({"sampler": "checkpoint"}, "sigmas for sampler checkpoint"),
        ({"sigmas": None, "steps": 4}, "steps for sampler euler"),
        ({"sigmas": [0.5, 1]}, "do not fall"),
        ({"sigmas": [1, 1]}, "do not fall"),
        ({"sigmas": []}, "sigmas in"),
        ({"sigmas": [1, 0]}, "sigmas in"),
        ({"sigmas": [1.5]}, "sigmas in"),
        ({"sigmas": ["1"]}, "sigmas in"),
        ({"sigmas": [float("nan")]}, "sigmas in"),
        ({"sigmas": None, "indices": [1000, 500]}, "indices without flow_shift"),
        ({"sigmas": None, "timesteps": [1.0, 0.75, 0.5]}, r"timesteps in few_step.toml: \[1.0, 0.75, 0.5\]"),
        ({"sigmas": None, "timesteps": [1]}, "timesteps in"),
        ({"sigmas": None, "indices": [1, 0.5], "flow_shift": 5}, "indices in"),
        ({"expert_switch": 2}, "expert_switch in"),
        ({"lora": ""}, "lora in"),
    ],
    ids=str,
)
def test_a_recipe_that_is_none_is_refused(change: dict[str, object], message: str) -> None:
    table = {key: value for key, value in (EULER | change).items() if value is not None}
    with pytest.raises(ModelError, match=message) as caught:
        parse_recipe(table, origin="few_step.toml")
    assert caught.value.hint


def test_noise_levels_given_as_timesteps_are_told_their_key() -> None:
    with pytest.raises(ModelError) as caught:
        parse_recipe({"name": "a", "sampler": "euler", "timesteps": [1, 0.5]}, origin="few_step.toml")
    assert "noise levels from 1 are `sigmas`" in str(caught.value.hint)


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(ModelError, match=FILE_NAME):
        read_recipe(tmp_path / FILE_NAME)


# ---- samplers ---------------------------------------------------------------------------------------


def test_euler_steps_are_those_of_diffusers() -> None:
    sigmas = [1.0, 0.9375, 0.8333, 0.625]
    theirs = FlowMatchEulerDiscreteScheduler()
    theirs.set_timesteps(sigmas=sigmas)
    ours = EulerSteps(sigmas, device="cpu")
    assert torch.allclose(ours.timesteps, theirs.timesteps)
    expected = latents = initial_noise([1, 2], shape_CTHW=SHAPE)
    for index, timestep in enumerate(theirs.timesteps):
        sigma = float(timestep) / 1000
        expected = theirs.step(velocity(expected, sigma), timestep, expected, return_dict=False)[0]
        latents = ours.step(velocity(latents, sigma), index=index, latents_BCTHW=latents)
    assert (latents - expected).abs().max() < 1e-6


@pytest.mark.parametrize("trained", [1000, 500])
def test_timesteps_are_levels_of_as_many_as_were_trained(trained: int) -> None:
    euler = EulerSteps([1.0, 0.5], device="cpu", num_train_timesteps=trained)
    renoising = RenoisingSteps([1.0, 0.5], seeds=[1], device="cpu", num_train_timesteps=trained)
    for sampler in (euler, renoising):
        assert sampler.timesteps.tolist() == [trained, trained / 2]


def renoised(seeds: list[int]) -> torch.Tensor:
    sampler = RenoisingSteps(LEVELS, seeds=seeds, device="cpu")
    assert sampler.timesteps.tolist() == pytest.approx([1000, 757, 522])
    latents = initial_noise(seeds, shape_CTHW=SHAPE)
    for index, sigma in enumerate(LEVELS):
        latents = sampler.step(velocity(latents, sigma), index=index, latents_BCTHW=latents)
    return latents


def test_renoising_keeps_a_clip_apart_from_its_neighbours() -> None:
    both = renoised([7, 2**63 - 1])
    assert torch.equal(both[:1], renoised([7]))
    assert torch.equal(both[1:], renoised([2**63 - 1]))
    assert not torch.equal(both[0], both[1])


def test_renoising_goes_through_the_clean_latents() -> None:
    sampler = RenoisingSteps(LEVELS, seeds=[3], device="cpu")
    clean, noise = initial_noise([5], shape_CTHW=SHAPE), initial_noise([6], shape_CTHW=SHAPE)
    fresh = initial_noise([step_seed(3, 1)], shape_CTHW=SHAPE)
    # At noise level s latents are (1 - s) clean + s noise, and the velocity is noise - clean.
    latents = (1 - LEVELS[1]) * clean + LEVELS[1] * noise
    following = sampler.step(noise - clean, index=1, latents_BCTHW=latents)
    assert (following - ((1 - LEVELS[2]) * clean + LEVELS[2] * fresh)).abs().max() < 1e-6
    last = (1 - LEVELS[2]) * clean + LEVELS[2] * noise
    assert (sampler.step(noise - clean, index=2, latents_BCTHW=last) - clean).abs().max() < 1e-6


def test_every_seed_and_step_has_noise_of_its_own() -> None:
    seeds = {step_seed(seed, index) for seed in (0, 1, 11, 12, 2**63 - 1) for index in range(13)}
    assert len(seeds) == 65
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---- weights ----------------------------------------------------------------------------------------


def test_turbo_takes_the_few_step_lora_that_comes_with_a_model() -> None:
    plain, turbo = (resolve_model(Weights("builtin", few_step=few_step)) for few_step in (False, True))
    assert (plain.spec.few_step, plain.spec.default_steps) == (None, 20)
    assert turbo.spec.few_step == "the built-in few-step LoRA"
    assert (turbo.spec.default_steps, turbo.spec.default_guidance_scale) == (4, 1.0)
    assert turbo.spec.default_flow_shift == plain.spec.default_flow_shift
    assert turbo.spec.revision.startswith(f"{plain.spec.revision}+")
    (lora,) = turbo.source.loras
    assert lora.strength == 1.0


def test_turbo_of_many_step_weights_says_what_is_missing(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "m", "t2v")
    with pytest.raises(ModelError, match="`turbo` needs weights") as caught:
        resolve_model(Weights(str(folder), few_step=True))
    assert FILE_NAME in str(caught.value.hint)


@pytest.mark.parametrize("few_step", [False, True])
def test_a_few_step_checkpoint_is_one_whatever_the_preset(few_step: bool, tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "m", "t2v")
    (folder / FILE_NAME).write_text('name = "student"\nsampler = "renoise"\ntimesteps = [1000, 757, 522]\n')
    found = resolve_model(Weights(str(folder), few_step=few_step))
    assert (found.spec.few_step, found.spec.default_steps) == ("student", 3)
    assert found.source.loras == ()


def write_recipe(folder: Path, *, sampler: str, name: str = "student", **more: str) -> None:
    lines = [f'name = "{name}"', f'sampler = "{sampler}"', "sigmas = [1, 0.5]"]
    lines += [f'{key} = "{value}"' for key, value in more.items()]
    (folder / FILE_NAME).write_text("\n".join(lines))


def builtin_lora(file: Path) -> Path:
    file.parent.mkdir(exist_ok=True)
    source = resolve_model(Weights("builtin", few_step=True)).source.loras[0].files[0]
    file.write_bytes(source.read_bytes())
    return file


def test_another_recipe_is_another_revision(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "m", "t2v")
    lora = builtin_lora(tmp_path / "lora" / "a.safetensors")
    asked = [Weights(str(folder)), Weights("builtin", str(lora), few_step=True)]
    revisions = []
    for sampler in ("euler", "renoise"):
        for place in (folder, lora.parent):
            write_recipe(place, sampler=sampler)
        revisions.append([resolve_model(weights).source.revision for weights in asked])
    (checkpoint, with_lora), (other_checkpoint, with_other) = revisions
    assert checkpoint != other_checkpoint
    assert with_lora != with_other
    write_recipe(lora.parent, sampler="renoise", name="the same by another name")
    assert resolve_model(asked[1]).source.revision == with_other


def test_an_alias_pins_the_recipe_of_a_checkpoint_too(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "m", "t2v")
    pinned = []
    for sampler in ("euler", "renoise"):
        write_recipe(folder, sampler=sampler)
        pinned.append(resolve_model(str(folder)).source.base_revision)
    assert pinned[0] != pinned[1]


def test_a_recipe_is_of_the_lora_that_it_lies_beside_alone(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    few = builtin_lora(shelf / "few.safetensors")
    write_recipe(shelf, sampler="euler")
    assert find_lora(str(few)).recipe is not None
    assert find_lora(str(shelf)).recipe is not None
    style = builtin_lora(shelf / "style.safetensors")
    assert [find_lora(str(file)).recipe for file in (few, style)] == [None, None]


def test_a_lora_in_a_checkpoints_folder_has_no_part_in_its_recipe(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "m", "t2v")
    lora = builtin_lora(folder / "style.safetensors")
    write_recipe(folder, sampler="euler", lora="few_step")
    assert find_lora(str(lora)).recipe is None
    (tmp_path / "apart").mkdir()
    moved = builtin_lora(tmp_path / "apart" / "style.safetensors")
    write_recipe(moved.parent, sampler="euler", lora="few_step")
    assert find_lora(str(moved)).recipe is None


def test_the_few_step_lora_of_a_model_is_not_taken_twice(tmp_path: Path) -> None:
    lora = builtin_lora(tmp_path / "mine" / "copy.safetensors")
    with pytest.raises(ModelError, match="a second time"):
        resolve_model(Weights("builtin", str(lora), few_step=True))


@pytest.mark.parametrize(
    "content", [b"a=" + b"[" * 5000, b'name = "a\\u001b[31m"\nsampler = "euler"\nsigmas=[1]']
)
def test_a_hostile_recipe_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(ModelError):
        read_recipe(tmp_path / FILE_NAME)


def test_two_recipes_at_once_are_refused(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "m", "t2v")
    (folder / FILE_NAME).write_text('name = "student"\nsampler = "euler"\nsigmas = [1, 0.5]\n')
    builtin = Path(resolve_model("builtin").source.folder)
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "a.safetensors").write_bytes(
        (builtin / "few_step" / "pytorch_lora_weights.safetensors").read_bytes()
    )
    (lora / FILE_NAME).write_text('name = "other"\nsampler = "euler"\nsigmas = [1, 0.5]\n')
    with pytest.raises(ModelError, match="two few-step recipes at once, student and other"):
        resolve_model(Weights(str(folder), str(lora)))


@pytest.mark.parametrize("sampler", ["euler", "renoise"])
def test_a_clip_of_a_recipe_depends_on_its_seed_alone(sampler: str, tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "m", "a14b")
    (folder / FILE_NAME).write_text(
        f'name = "student"\nsampler = "{sampler}"\ntimesteps = [1000, 900, 600]\nexpert_switch = 0.7\n'
    )
    model = resolve_model(Weights(str(folder), few_step=True))
    engine = build_engine(EngineConfig(device="cpu", models={model.source.weights: model.source}))

    def frames(*seeds: int, size: int | None = None) -> dict[str, np.ndarray]:
        jobs = [
            make_job(
                model, id=str(seed), seed=seed, steps=3, guidance_scale=1.0, guidance_scale_2=1.0,
                preset="turbo", fps=Fraction(8),
            )
            for seed in seeds
        ]  # fmt: skip
        clips = engine.render(make_batch(model, *jobs, size=size)).clips
        return {clip.job_id: np.asarray(clip.frames) for clip in clips}

    full = frames(1, 2, 3, 4)
    assert np.array_equal(frames(3, size=4)["3"], full["3"])
    assert not np.array_equal(full["1"], full["2"])
