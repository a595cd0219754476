"""Every part of the training runs, goes on where it was stopped, and ends in a checkpoint that loads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from manifests.errors import UsageError
from pipeline.models.lora import FusedLoras
from pipeline.models.lora_files import find_lora
from pipeline.models.resolve import resolve_model
from pipeline.models.tiny import lora, parts, train
from pipeline.models.tiny.bank import Size
from pipeline.models.tiny.denoiser import rope_tables
from pipeline.models.tiny.distill import choose_guidance, distill
from pipeline.models.tiny.evaluate import default_settings, evaluate
from pipeline.models.tiny.export import export
from pipeline.models.tiny.flat import Layout
from pipeline.models.tiny.networks import REAL, TOY, make_transformer, make_vae
from pipeline.models.tiny.state import Minutes, State, Steps
from pipeline.models.tiny.train import main
from pipeline.models.tiny.train_denoiser import Batch, flow_loss, initial_weights, train_denoiser
from pipeline.models.tiny.train_vae import train_vae
from pipeline.models.tiny.training import Training
from pipeline.models.wan import load_wan
from tests.pipeline_checkpoints import make_batch, make_engine, make_job

SIZES = [(64, 64), (96, 64), (64, 96), (96, 96)]


def run_vae(state: State, steps: Steps) -> None:
    train_vae(state, steps, TOY, device="cpu", batch=2, num_test_clips=2)


def run_denoiser(state: State, steps: Steps) -> None:
    banks = [Size(width=width, height=height, num_clips=2) for width, height in SIZES]
    train_denoiser(state, steps, TOY, device="cpu", batch=8, bank_sizes=banks)


def run_distill(state: State, steps: Steps) -> None:
    sizes = [Size(width=width, height=height, num_clips=4) for width, height in SIZES[:3]]
    distill(
        state,
        steps,
        TOY,
        device="cpu",
        guidance_scale=2.0,
        batch=2,
        trajectory_sizes=sizes,
        teacher_batch=2,
    )


Part = Callable[[State, Steps], None]
PARTS: dict[str, Part] = {"vae": run_vae, "denoiser": run_denoiser, "few_step": run_distill}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state with every part done in four steps."""
    state = State(tmp_path_factory.mktemp("state"))
    for part in PARTS.values():
        part(state, Steps(4))
    return state.folder


@pytest.fixture(scope="module")
def folder(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    export(State(trained), folder, TOY)
    return folder


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_was_stopped_ends_as_if_it_had_not_been(trained: Path, tmp_path: Path, name: str) -> None:
    for earlier in list(PARTS)[: list(PARTS).index(name)]:
        shutil.copy(trained / f"{earlier}.safetensors", tmp_path)
    PARTS[name](State(tmp_path), Steps(4, stop_at=2))
    stopped, facts = State(tmp_path).result(name)
    assert facts["step"] == 2
    assert (tmp_path / "unfinished" / f"{name}.safetensors").is_file()
    PARTS[name](State(tmp_path), Steps(4))
    assert not (tmp_path / "unfinished" / f"{name}.safetensors").is_file()
    resumed, straight = (load_file(path / f"{name}.safetensors") for path in (tmp_path, trained))
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[key], straight[key]) for key in straight)
    assert any(not torch.equal(stopped[key], resumed[key].float()) for key in stopped)


def test_a_finished_part_is_left_alone(trained: Path) -> None:
    before = (trained / "vae.safetensors").read_bytes()
    run_vae(State(trained), Steps(4))
    assert (trained / "vae.safetensors").read_bytes() == before


def test_a_result_alone_is_enough_to_go_on_from(trained: Path, tmp_path: Path) -> None:
    """As on another machine, where the optimiser was left behind."""
    run_vae(State(tmp_path), Steps(4, stop_at=2))
    shutil.rmtree(tmp_path / "unfinished")
    run_vae(State(tmp_path), Steps(4))
    assert State(tmp_path).result("vae")[1]["step"] == 4


def test_a_finished_part_can_be_extended(tmp_path: Path) -> None:
    state = State(tmp_path)
    state.save_result("part", {"w": torch.ones(3)}, step=9, done=1.0)

    def training(extend: bool) -> Training:
        return Training(
            state,
            "part",
            {"w": torch.zeros(3)},
            budget=Minutes(0.01),
            device="cpu",
            learning_rate=0.1,
            average_decay=0.5,
            extend=extend,
        )

    assert training(extend=False).is_finished
    longer = training(extend=True)
    assert not longer.is_finished
    longer.run(lambda step: (), lambda weights: weights["w"].square().sum())
    weights, facts = state.result("part")
    assert facts["done"] == 1
    assert facts["step"] > 9
    assert (weights["w"] < 1).all()


def test_an_interrupted_part_goes_on_from_the_step_it_was_at(tmp_path: Path) -> None:
    state = State(tmp_path)

    def training() -> Training:
        return Training(
            state,
            "part",
            {"w": torch.zeros(3)},
            budget=Steps(9),
            device="cpu",
            learning_rate=0.1,
            average_decay=0.5,
        )

    def interrupted_at_5(step: int) -> tuple[()]:
        if step == 5:
            raise KeyboardInterrupt
        return ()

    def loss_of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return (weights["w"] - 1).square().sum()

    with pytest.raises(KeyboardInterrupt):
        training().run(interrupted_at_5, loss_of)
    resumed = training()
    assert resumed.step == 5
    resumed.run(lambda step: (), loss_of)
    assert state.result("part")[1]["step"] == 9
    assert state.unfinished("part") is None


@pytest.mark.parametrize("arguments", ["--captions 0", "--seeds -1", "--captions many"])
def test_counts_of_nothing_are_refused(
    arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", "--state", str(tmp_path), *arguments.split()])
    assert arguments.split()[0] in capsys.readouterr().err


def test_training_finds_a_minimum_and_ignores_a_step_that_is_not_finite(tmp_path: Path) -> None:
    training = Training(
        State(tmp_path),
        "part",
        {"w": torch.full((5,), 3.0)},
        budget=Steps(600),
        device="cpu",
        learning_rate=0.05,
        average_decay=0.9,
    )
    target = torch.arange(5.0)

    def inputs_of(step: int) -> tuple[torch.Tensor]:
        return (torch.tensor(float("nan") if step == 100 else 1.0),)

    def loss_of(weights: dict[str, torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        return factor * (weights["w"] - target).square().sum()

    training.run(inputs_of, loss_of)
    assert (training.averaged()["w"] - target).abs().max() < 0.01


def test_a_part_names_the_one_that_it_needs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no vae\.safetensors"):
        run_denoiser(State(tmp_path), Steps(1))


def test_a_flat_tensor_gives_every_weight_and_its_gradient_back() -> None:
    weights = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.randn(2, 2, 2)}
    layout = Layout(weights)
    flat = layout.flatten(weights, device="cpu").requires_grad_()
    views = layout.split(flat)
    assert all(torch.equal(views[name], weights[name]) for name in weights)
    assert all(view.data_ptr() % 16 == 0 for view in views.values())
    (views["b"] * weights["b"]).sum().backward()
    gradients = layout.split(flat.grad)
    assert torch.equal(gradients["b"], weights["b"])
    assert torch.count_nonzero(gradients["a"]) == 0


def test_the_flow_loss_is_that_of_noise_minus_data() -> None:
    """A network whose output is zero is off by the target itself."""
    torch.manual_seed(0)
    data = torch.randn(64, 8, 16)
    noise = torch.randn(data.shape)
    batch = Batch(
        patches_BNP=data,
        ids_BL=torch.ones(64, 39, dtype=torch.long),
        lengths_B=torch.full((64,), 5),
        noise_BNP=noise,
        sigma_B=torch.rand(64),
    )
    loss = flow_loss(initial_weights(TOY), batch, rope_tables(2, 4, 4, "cpu"), None)
    assert loss.item() == pytest.approx((noise - data).square().mean().item(), rel=1e-5)


def test_the_exported_model_renders_through_the_engine(folder: Path) -> None:
    model = resolve_model(str(folder))
    spec = model.spec
    assert (spec.default_width, spec.default_height, spec.default_num_frames) == (64, 64, 17)
    assert (spec.default_fps, spec.default_steps, spec.default_flow_shift) == (8, 20, 3.0)
    for width, height in spec.resolutions.values():
        assert width % spec.multiple == height % spec.multiple == 0
    job = make_job(model, prompt="a red circle 字", negative_prompt="", num_frames=17, steps=2)
    (clip,) = make_engine(model).render(make_batch(model, job)).clips
    assert clip.frames is not None
    assert clip.frames.shape == (17, 96, 64)


def test_the_exported_vae_has_the_measured_statistics(trained: Path, folder: Path) -> None:
    facts = State(trained).result("vae")[1]
    config = json.loads((folder / "vae" / "config.json").read_text())
    for name in ("latents_mean", "latents_std"):
        assert config[name] == pytest.approx(facts[name])
        assert config[name] != [0.0] * len(config[name])


def test_the_few_step_update_changes_the_model_as_training_saw_it(trained: Path, folder: Path) -> None:
    model = resolve_model(str(folder))
    load = {"device": "cpu", "dtype": "float32", "vae_dtype": "float32"}
    module = load_wan(model.source, **load).experts[0].module
    plain = {name: tensor.clone() for name, tensor in module.named_parameters()}
    file = folder / "few_step" / lora.FILE_NAME
    update = load_file(file)
    assert {tensor.dtype for tensor in update.values()} == {torch.float16}
    for key in update:  # a toy's four steps leave it next to nothing
        if key.endswith("lora_B.weight"):
            update[key] = torch.randn_like(update[key])
    changed = file.with_name("changed.safetensors")
    save_file(update, changed)
    FusedLoras([module]).use([find_lora(str(changed)).source])
    wanted = lora.merged(plain, {key: tensor.float() for key, tensor in update.items()})
    fused = dict(module.named_parameters())
    assert all((fused[name] - wanted[name]).abs().max() < 1e-4 for name in wanted)
    changed_names = {name for name in plain if not torch.equal(plain[name], fused[name])}
    assert "blocks.1.attn2.to_out.0.weight" in changed_names
    assert "condition_embedder.time_proj.weight" in changed_names
    assert not any("text_embedder" in name or "norm" in name for name in changed_names)
    changed.unlink()


def test_an_untrained_update_changes_nothing() -> None:
    weights = dict(make_transformer(TOY).named_parameters())
    same = lora.merged(weights, lora.initial_lora(weights, rank=3))
    assert all(torch.equal(same[name], weights[name]) for name in weights)


def test_evaluation_scores_every_setting(folder: Path) -> None:
    settings = default_settings(folder)
    assert [setting.few_step for setting in settings] == [False, False, False, False, True]
    assert settings[0].guidance_scale > 1
    scores = evaluate(folder, [settings[2], settings[-1]], device="cpu", num_captions=2, num_seeds=2)
    assert [score.num_clips for score in scores] == [4, 4]
    for score in scores:
        assert 0 <= score.all_three <= min(score.colour, score.shape, score.motion) <= 1


def test_the_chosen_guidance_becomes_the_default(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "state")
    state = State(tmp_path / "state")
    scale = choose_guidance(state, TOY, device="cpu", num_captions=1, num_seeds=1)
    assert scale == choose_guidance(state, TOY, device="cpu", num_captions=1, num_seeds=1)
    state.save_facts("guidance", {"guidance_scale": 2.5})
    export(state, tmp_path / "model", TOY)
    assert resolve_model(str(tmp_path / "model")).spec.default_guidance_scale == 2.5


def test_the_command_runs_a_part(tmp_path: Path, trained: Path) -> None:
    shutil.copytree(trained, tmp_path / "state")
    arguments = ["export", "--toy", "--state", str(tmp_path / "state"), "--folder", str(tmp_path / "model")]
    train.main(arguments)
    assert (tmp_path / "model" / "few_step" / lora.FILE_NAME).is_file()
    assert "exported" in (tmp_path / "state" / "train.log").read_text()
    assert set(train.MINUTES) < set(train.PARTS)


def test_the_real_model_fits_its_size() -> None:
    sizes = parts.REAL_PLAN.sizes
    weights = initial_weights(sizes)
    transformer = {
        name.removeprefix("transformer."): tensor
        for name, tensor in weights.items()
        if "transformer." in name
    }
    update = lora.initial_lora(transformer, rank=sizes.lora_rank)
    vae = sum(tensor.numel() for tensor in make_vae(sizes).parameters())
    numbers = vae + sum(tensor.numel() for tensor in [*weights.values(), *update.values()])
    assert 2 * numbers < 15_900_000


# ---- what a user may do to a state folder -----------------------------------------------------------------


def test_damaged_state_names_its_file(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    for name in ("vae.safetensors", "guidance.json"):
        file = tmp_path / name
        file.write_bytes(b"\x07half")
        with pytest.raises(UsageError, match=re.escape(str(file))):
            State(tmp_path).result("vae") if file.suffix != ".json" else State(tmp_path).facts("guidance")


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no vae\.safetensors.*run the part `vae` first"):
        main(["export", "--toy", "--state", str(tmp_path), "--device", "cpu"])


def test_state_of_networks_of_other_sizes_is_refused(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    with pytest.raises(SystemExit, match="other sizes"):
        main(["export", "--state", str(tmp_path), "--device", "cpu"])
    with pytest.raises(UsageError, match="other sizes"):
        train_vae(State(tmp_path), Steps(9), REAL, device="cpu", batch=1, num_test_clips=1)


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    with State(tmp_path).locked(), pytest.raises(SystemExit, match="another process trains"):
        main(["vae", "--toy", "--state", str(tmp_path), "--device", "cpu"])


def test_export_leaves_no_few_step_update_of_another_model(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "state")
    (tmp_path / "state" / "few_step.safetensors").unlink(missing_ok=True)
    folder = tmp_path / "model"
    (folder / "few_step").mkdir(parents=True)
    (folder / "few_step" / "pytorch_lora_weights.safetensors").write_bytes(b"another's")
    export(State(tmp_path / "state"), folder, TOY)
    assert not (folder / "few_step").exists()


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "soon"])
def test_minutes_are_a_time_to_train(
    minutes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["vae", "--state", str(tmp_path), "--minutes", minutes])
    assert "--minutes" in capsys.readouterr().err
