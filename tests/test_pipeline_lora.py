"""LoRAs: found, checked, fused into the weights, exchanged for others, and of every format people have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from manifests.errors import ModelError
from manifests.job import Weights
from pipeline import engine as engine_module
from pipeline.config import EngineConfig
from pipeline.engine import Engine, build_engine
from pipeline.models import lora as lora_module
from pipeline.models import lora_files
from pipeline.models.hub import Snapshot
from pipeline.models.lora import FusedLoras
from pipeline.models.lora_files import find_lora, find_loras
from pipeline.models.lora_fit import wan_layers
from pipeline.models.resolve import ResolvedModel, resolve_model
from pipeline.models.wan import load_wan
from tests.pipeline_checkpoints import build_checkpoint, make_batch, make_job
from tests.pipeline_hub import COMMIT, run_python, serve_hub
from tests.pipeline_ops import rand

RANK = 2
LAYER = "blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("t2v"), "t2v")


@pytest.fixture(scope="module")
def weight(folder: Path) -> torch.Tensor:
    """What is updated, as the checkpoint has it."""
    return _module(resolve_model(str(folder))).get_parameter(f"{LAYER}.weight").clone()


def _module(model: ResolvedModel) -> Any:
    return load_wan(model.source, device="cpu", dtype="float32", vae_dtype="float32").experts[0].module


def update(weight: torch.Tensor, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    return rand(RANK, columns, seed=seed), rand(rows, RANK, seed=seed + 1)


def lora_file(file: Path, tensors: Mapping[str, torch.Tensor], **metadata: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata=metadata or None
    )
    return file


def plain_lora(file: Path, weight: torch.Tensor, *, seed: int = 1) -> Path:
    down, up = update(weight, seed=seed)
    names = {f"transformer.{LAYER}.lora_A.weight": down, f"transformer.{LAYER}.lora_B.weight": up}
    return lora_file(file, names)


def fused(folder: Path, lora: str) -> torch.Tensor:
    model = resolve_model(Weights(str(folder), lora))
    return _module(model).get_parameter(f"{LAYER}.weight")


def test_an_update_is_added_with_its_strength(folder: Path, weight: torch.Tensor, tmp_path: Path) -> None:
    file = plain_lora(tmp_path / "a.safetensors", weight)
    down, up = update(weight, seed=1)
    for lora, strength in ((f"{file}", 1.0), (f"{file}=0.5", 0.5), (f"{file} = -2", -2.0)):
        expected = weight + strength * (up @ down)
        assert (fused(folder, lora) - expected).abs().max() < 1e-6, lora


def test_several_are_added_together(folder: Path, weight: torch.Tensor, tmp_path: Path) -> None:
    files = [plain_lora(tmp_path / f"{seed}.safetensors", weight, seed=seed) for seed in (1, 5)]
    total = weight + sum(up @ down for down, up in (update(weight, seed=seed) for seed in (1, 5)))
    assert (fused(folder, f"{files[0]}, {files[1]}") - total).abs().max() < 4e-6  # two roundings of up to 20


@pytest.mark.parametrize("how", ["original names with alpha", "alpha in the metadata", "alpha beside it"])
def test_formats_that_people_have(how: str, folder: Path, weight: torch.Tensor, tmp_path: Path) -> None:
    down, up = update(weight, seed=1)
    file, own = tmp_path / "a.safetensors", f"transformer.{LAYER}"
    if how == "original names with alpha":
        name = "diffusion_model.blocks.0.self_attn.q"
        lora_file(
            file,
            {
                f"{name}.lora_down.weight": down,
                f"{name}.lora_up.weight": up,
                f"{name}.alpha": torch.tensor(1.0),
            },
        )
    elif how == "alpha in the metadata":
        metadata = json.dumps({"transformer.r": RANK, "transformer.lora_alpha": 1})
        lora_file(
            file,
            {f"{own}.lora_A.weight": down, f"{own}.lora_B.weight": up},
            lora_adapter_metadata=metadata,
        )
    else:
        lora_file(
            file,
            {f"{own}.lora_A.weight": down, f"{own}.lora_B.weight": up, f"{own}.alpha": torch.tensor(1.0)},
        )
    expected = weight + up @ down / RANK
    assert (fused(folder, str(file)) - expected).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("metadata", "scale"),
    [
        ({"lora_alpha": 16}, 8.0),
        ({"lora_alpha": 16, "use_rslora": True}, 16 / 2**0.5),
        ({"lora_alpha": 2, "alpha_pattern": {LAYER: 16}}, 8.0),
        ({"lora_alpha": 2, "alpha_pattern": {"to_q": 6, LAYER: 16}}, 3.0),
        ({"lora_alpha": 2, "alpha_pattern": {"q": 16}}, 1.0),
        ({"r": 8, "lora_alpha": 8, "rank_pattern": {LAYER: RANK}}, 4.0),
    ],
    ids=str,
)
def test_what_peft_was_told_counts(
    metadata: Mapping[str, Any], scale: float, folder: Path, weight: torch.Tensor, tmp_path: Path
) -> None:
    down, up = update(weight, seed=1)
    own, bias = f"transformer.{LAYER}", rand(len(weight), seed=9)
    said = json.dumps({f"transformer.{key}": value for key, value in metadata.items()})
    names = {f"{own}.lora_A.weight": down, f"{own}.lora_B.weight": up, f"{own}.lora_B.bias": bias}
    file = lora_file(tmp_path / "a.safetensors", names, lora_adapter_metadata=said)
    module, plain = (
        _module(resolve_model(Weights(str(folder), str(file)))),
        _module(resolve_model(str(folder))),
    )
    assert (module.get_parameter(f"{LAYER}.weight") - (weight + scale * (up @ down))).abs().max() < 4e-6
    added = module.get_parameter(f"{LAYER}.bias") - plain.get_parameter(f"{LAYER}.bias")
    assert (added - scale * bias).abs().max() < 4e-6


def test_sums_are_rounded_once(folder: Path, weight: torch.Tensor, tmp_path: Path) -> None:
    module = _module(resolve_model(str(folder))).to(torch.bfloat16)
    before = module.get_parameter(f"{LAYER}.weight").clone()
    found = [
        find_lora(f"{plain_lora(tmp_path / f'{n}.safetensors', weight, seed=n)}=0.01") for n in (1, 5, 9)
    ]
    FusedLoras([module]).use([one.source for one in found])
    total = before.float() + sum(
        0.01 * (up @ down) for down, up in (update(weight, seed=n) for n in (1, 5, 9))
    )
    assert torch.equal(module.get_parameter(f"{LAYER}.weight"), total.to(torch.bfloat16))


def test_weights_come_back_to_the_bit(folder: Path, weight: torch.Tensor, tmp_path: Path) -> None:
    module = _module(resolve_model(str(folder))).to(torch.bfloat16)
    loras = FusedLoras([module])
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    found = [find_lora(str(plain_lora(tmp_path / f"{n}.safetensors", weight, seed=n))).source for n in (1, 5)]
    for lora in (*found, *found):
        loras.use([lora])
        assert not torch.equal(module.get_parameter(f"{LAYER}.weight"), before[f"{LAYER}.weight"])
    loras.use([])
    assert all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())


def test_an_engine_exchanges_loras_without_loading_the_model_again(
    folder: Path, weight: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = plain_lora(tmp_path / "a.safetensors", weight)
    asked = [Weights(str(folder)), Weights(str(folder), str(file)), Weights(str(folder), f"{file}=0.5")]
    models = [resolve_model(weights) for weights in asked]
    alone = [_frames(_engine(model), model) for model in models]
    assert not np.array_equal(alone[0], alone[1])
    loaded: list[Any] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        loaded.append(args)
        return load_wan(*args, **kwargs)

    monkeypatch.setattr(engine_module, "load_wan", counting)
    engine = _engine(*models)
    for index in (0, 1, 2, 1, 0):
        assert np.array_equal(_frames(engine, models[index]), alone[index]), index
    assert len(loaded) == 1


def _engine(*models: ResolvedModel) -> Engine:
    return build_engine(EngineConfig(device="cpu", models={one.source.weights: one.source for one in models}))


def _frames(engine: Engine, model: ResolvedModel) -> Any:
    (clip,) = engine.render(make_batch(model, make_job(model))).clips
    return clip.frames


def test_each_expert_gets_its_own(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "a14b", "a14b")
    plain = load_wan(resolve_model(str(folder)).source, device="cpu", dtype="float32", vae_dtype="float32")
    before = [expert.module.get_parameter(f"{LAYER}.weight").clone() for expert in plain.experts]
    for expert, seed in (("high_noise_model", 1), ("low_noise_model", 5)):
        plain_lora(tmp_path / "pair" / f"{expert}.safetensors", before[0], seed=seed)
    source = resolve_model(Weights(str(folder), str(tmp_path / "pair"))).source
    both = load_wan(source, device="cpu", dtype="float32", vae_dtype="float32")
    for expert, original, seed in zip(both.experts, before, (1, 5), strict=True):
        down, up = update(original, seed=seed)
        found = expert.module.get_parameter(f"{LAYER}.weight")
        assert (found - (original + up @ down)).abs().max() < 1e-6


@pytest.mark.parametrize(
    "how", ["a pair in names of its own", "one file for both", "one file of one expert", "of all"]
)
def test_experts_of_one_file_and_of_two(how: str, tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "a14b", "a14b")
    plain = load_wan(resolve_model(str(folder)).source, device="cpu", dtype="float32", vae_dtype="float32")
    before = [expert.module.get_parameter(f"{LAYER}.weight").clone() for expert in plain.experts]
    products = [update(before[0], seed=seed) for seed in (1, 5)]

    def names(expert: int, prefix: str) -> dict[str, torch.Tensor]:
        down, up = products[expert]
        return {f"{prefix}.{LAYER}.lora_A.weight": down, f"{prefix}.{LAYER}.lora_B.weight": up}

    first, second = names(0, "transformer"), names(1, "transformer_2")
    wanted = [0, 1]
    if how == "a pair in names of its own":
        lora_file(tmp_path / "lora" / "High_noise.safetensors", first)
        lora_file(tmp_path / "lora" / "Low_noise.safetensors", second)
    elif how == "one file for both":
        lora_file(tmp_path / "lora" / "a.safetensors", first | second)
    elif how == "one file of one expert":
        lora_file(tmp_path / "lora" / "a.safetensors", second)
        wanted = [-1, 1]
    else:
        lora_file(tmp_path / "lora" / "a.safetensors", first)
        wanted = [0, 0]
    source = resolve_model(Weights(str(folder), str(tmp_path / "lora"))).source
    fused = load_wan(source, device="cpu", dtype="float32", vae_dtype="float32")
    for expert, original, number in zip(fused.experts, before, wanted, strict=True):
        down, up = products[number]
        expected = original if number < 0 else original + up @ down
        assert (expert.module.get_parameter(f"{LAYER}.weight") - expected).abs().max() < 1e-6, (how, number)


def test_a_pair_is_refused_by_a_model_of_one_expert(
    folder: Path, weight: torch.Tensor, tmp_path: Path
) -> None:
    for expert in ("high_noise", "low_noise"):
        plain_lora(tmp_path / f"{expert}.safetensors", weight)
    with pytest.raises(ModelError, match="for two experts, where the model has one"):
        resolve_model(Weights(str(folder), str(tmp_path)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora_A.weight": torch.full((RANK, 24), torch.nan)}, "values that are no numbers"),
        ({"alpha": torch.tensor(torch.inf)}, "values that are no numbers"),
        (
            {"lora_A.weight": torch.ones(0, 24), "lora_B.weight": torch.ones(24, 0)},
            "no product of two matrices",
        ),
        ({"lora_magnitude_vector": torch.ones(24)}, "is of a DoRA"),
    ],
    ids=["nan", "alpha", "rank 0", "dora"],
)
def test_numbers_that_cannot_be_added_are_refused(
    changed: Mapping[str, torch.Tensor], message: str, folder: Path, tmp_path: Path
) -> None:
    names = {"lora_A.weight": torch.ones(RANK, 24), "lora_B.weight": torch.ones(24, RANK)} | changed
    file = lora_file(
        tmp_path / "a.safetensors", {f"transformer.{LAYER}.{name}": value for name, value in names.items()}
    )
    with pytest.raises(ModelError, match=message):
        fused(folder, str(file))


def verdicts(folder: Path, file: Path) -> tuple[str | None, str | None]:
    """What is told of a LoRA when it is planned, and, without that, when it is loaded."""

    def told(fails: Callable[[], object]) -> str | None:
        try:
            fails()
        except ModelError as error:
            return error.message
        return None

    plain = resolve_model(str(folder))
    loaded = replace(plain, source=replace(plain.source, loras=(find_lora(str(file)).source,)))
    return told(lambda: resolve_model(Weights(str(folder), str(file)))), told(lambda: _module(loaded))


def original_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A LoRA of all layers, in the names of the model's first publication."""
    names = {
        "transformer.": "diffusion_model.",
        "attn1.to_": "self_attn.",
        "attn2.to_": "cross_attn.",
        "out.0.": "o.",
        "ffn.net.0.proj": "ffn.0",
        "ffn.net.2": "ffn.2",
        "condition_embedder.time_proj": "time_projection.1",
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "proj_out": "head.head",
    }
    renamed = {}
    for key, tensor in tensors.items():
        for ours, theirs in names.items():
            key = key.replace(ours, theirs)
        renamed[key] = tensor
    return renamed


def musubi_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = {}
    for key, tensor in original_names(tensors).items():
        module, _, matrix = key.removeprefix("diffusion_model.").rpartition(".lora_")
        if module.startswith("blocks."):
            name = f"lora_unet_{module.replace('.', '_')}"
            renamed[f"{name}.lora_{'down' if matrix[0] == 'A' else 'up'}.weight"] = tensor
            renamed[f"{name}.alpha"] = torch.tensor(1.0)
    return renamed


def lora_of_all_layers(layers: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, shape in layers.items():
        if name.endswith(".weight"):
            module = f"transformer.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.ones(RANK, shape[1])
            tensors[f"{module}.lora_B.weight"] = torch.ones(shape[0], RANK)
    return tensors


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "transformer" / "config.json").read_text())
    return config


def test_layers_are_told_by_the_config_as_the_loaded_model_has_them(folder: Path) -> None:
    found = {
        name: tuple(value.shape) for name, value in _module(resolve_model(str(folder))).named_parameters()
    }
    weights = {name for name, shape in found.items() if len(shape) == 2}
    biases = {f"{name.removesuffix('.weight')}.bias" for name in weights}
    assert wan_layers(config_of(folder)) == {name: found[name] for name in weights | biases}


@pytest.mark.parametrize("renamed", [dict, original_names, musubi_names])
@pytest.mark.parametrize("of", ["this model", "a wider one", "a deeper one"])
def test_plan_and_run_judge_a_lora_alike(
    renamed: Callable[[Any], dict[str, torch.Tensor]], of: str, folder: Path, tmp_path: Path
) -> None:
    change = {"this model": {}, "a wider one": {"num_attention_heads": 3}, "a deeper one": {"num_layers": 3}}
    layers = wan_layers(config_of(folder) | change[of])
    file = lora_file(tmp_path / "a.safetensors", renamed(lora_of_all_layers(layers)))
    planned, loaded = verdicts(folder, file)
    for told in (planned, loaded):
        assert (told is None) == (of == "this model")
        assert told is None or told.startswith("the LoRA changes ")


@pytest.mark.parametrize(
    "name",
    [
        "transformer.single_transformer_blocks.0.attn.to_q.lora_{}.weight",
        "diffusion_model.double_blocks.0.img_attn.proj.lora_{}.weight",
        "diffusion_model.blocks.0.attn1.to_q.lora_{}.weight",
        "diffusion_model.blocks.0.cross_attn.k_img.lora_{}.weight",
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_{}.weight",
        "unet.down_blocks.0.attentions.0.to_q.lora_{}.weight",
    ],
)
def test_loras_of_other_families_are_refused_by_plan_and_run(name: str, folder: Path, tmp_path: Path) -> None:
    halves = ("down", "up") if name.startswith("lora_unet") else ("A", "B")
    tensors = {name.format(half): torch.ones(24, 24) for half in halves}
    planned, loaded = verdicts(folder, lora_file(tmp_path / "a.safetensors", tensors))
    assert planned is not None
    assert loaded is not None
    assert "a.safetensors" in planned


def test_a_last_layer_given_whole_is_accepted_by_plan_and_run(folder: Path, tmp_path: Path) -> None:
    tensors = original_names(lora_of_all_layers(wan_layers(config_of(folder))))
    head = tensors.pop("diffusion_model.head.head.lora_B.weight")
    columns = tensors.pop("diffusion_model.head.head.lora_A.weight").shape[1]
    tensors["diffusion_model.head.head.diff"] = torch.ones(len(head), columns)
    tensors["diffusion_model.head.head.diff_b"] = torch.ones(len(head))
    assert verdicts(folder, lora_file(tmp_path / "a.safetensors", tensors)) == (None, None)


def test_a_dora_is_refused_by_plan_and_run(folder: Path, weight: torch.Tensor, tmp_path: Path) -> None:
    down, up = update(weight, seed=1)
    own = f"transformer.{LAYER}"
    names = {f"{own}.lora_A.weight": down, f"{own}.lora_B.weight": up, f"{own}.dora_scale": torch.ones(24)}
    planned, loaded = verdicts(folder, lora_file(tmp_path / "a.safetensors", names))
    assert planned == loaded
    assert planned is not None
    assert "is of a DoRA" in planned


def test_a_lora_of_another_model_is_refused_with_the_layer(folder: Path, tmp_path: Path) -> None:
    other = {
        f"transformer.{LAYER}.lora_A.weight": rand(RANK, 3, seed=1),
        f"transformer.{LAYER}.lora_B.weight": rand(5, RANK, seed=2),
    }
    file = lora_file(tmp_path / "other.safetensors", other)
    with pytest.raises(
        ModelError, match=rf"{LAYER}.weight, \(5, 3\), where the model has a layer of"
    ) as caught:
        fused(folder, str(file))
    assert caught.value.hint == "use a LoRA that was trained for this model"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lora_A.weight": (RANK, 8)}, "is no product of two matrices: none and "),
        ({"lora_A.weight": (RANK, 8), "lora_B.weight": (8, RANK + 1)}, "is no product of two matrices"),
        ({"lora_A.weight": (8,), "lora_B.weight": (8, RANK)}, "is no product of two matrices"),
    ],
    ids=str,
)
def test_halves_of_a_lora_are_refused(
    tensors: Mapping[str, tuple[int, ...]], message: str, folder: Path, tmp_path: Path
) -> None:
    file = lora_file(
        tmp_path / "half.safetensors",
        {f"transformer.{LAYER}.{name}": rand(*shape, seed=1) for name, shape in tensors.items()},
    )
    with pytest.raises(ModelError, match=message) as caught:
        fused(folder, str(file))
    assert str(file) in caught.value.message


def test_a_file_that_diffusers_makes_nothing_of_is_refused_with_its_reason(
    folder: Path, tmp_path: Path
) -> None:
    file = lora_file(
        tmp_path / "odd.safetensors", {"lora_unet_blocks_0_x.lora_down.weight": torch.ones(2, 2)}
    )
    with pytest.raises(ModelError, match=r"a LoRA that cannot be read: .*odd\.safetensors: .") as caught:
        fused(folder, str(file))
    assert caught.value.__cause__ is not None


def test_a_lora_without_a_layer_of_the_model_is_refused(
    folder: Path, weight: torch.Tensor, tmp_path: Path
) -> None:
    down, up = update(weight, seed=1)
    names = {f"transformer_2.{LAYER}.lora_A.weight": down, f"transformer_2.{LAYER}.lora_B.weight": up}
    file = lora_file(tmp_path / "second.safetensors", names)
    with pytest.raises(ModelError, match="no layer of the model is in the LoRA"):
        fused(folder, str(file))


def test_a_file_that_changes_after_the_plan_is_refused(
    folder: Path, weight: torch.Tensor, tmp_path: Path
) -> None:
    file = plain_lora(tmp_path / "a.safetensors", weight)
    model = resolve_model(Weights(str(folder), str(file)))
    plain_lora(file, weight, seed=5)
    with pytest.raises(ModelError, match="has changed since the plan was made"):
        _module(model)
    file.unlink()
    with pytest.raises(ModelError, match=r"cannot be read: .*No such file"):
        _module(model)


def test_tensors_of_no_use_are_told(
    folder: Path, weight: torch.Tensor, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    down, up = update(weight, seed=1)
    names = {f"transformer.{LAYER}.lora_A.weight": down, f"transformer.{LAYER}.lora_B.weight": up}
    file = lora_file(tmp_path / "a.safetensors", names | {"transformer.blocks.0.norm.diff": torch.ones(3)})
    assert (fused(folder, str(file)) - (weight + up @ down)).abs().max() < 1e-6
    assert "1 of 3 tensors of a LoRA" in capfd.readouterr().err


def test_an_exchange_that_fails_leaves_the_weights_alone(
    folder: Path, weight: torch.Tensor, tmp_path: Path
) -> None:
    module = _module(resolve_model(str(folder)))
    loras = FusedLoras([module])
    good, other = (find_lora(str(plain_lora(tmp_path / f"{n}.safetensors", weight, seed=n))) for n in (1, 5))
    loras.use([good.source])
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    wrong = lora_file(
        tmp_path / "wrong.safetensors",
        {
            f"transformer.{LAYER}.lora_A.weight": rand(RANK, 3, seed=1),
            f"transformer.{LAYER}.lora_B.weight": rand(5, RANK, seed=2),
        },
    )
    with pytest.raises(ModelError, match="the LoRA changes"):
        loras.use([other.source, find_lora(str(wrong)).source])
    assert all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())
    loras.use([])
    assert torch.equal(module.get_parameter(f"{LAYER}.weight"), weight)


def test_the_revision_tells_contents_and_strengths_apart(
    folder: Path, weight: torch.Tensor, tmp_path: Path
) -> None:
    one = plain_lora(tmp_path / "a.safetensors", weight)
    revisions = [
        resolve_model(Weights(str(folder), lora)).spec.revision
        for lora in (None, f"{one}", f"{one}=0.5", f"{one},{one}=0.5")
    ]
    plain_lora(one, weight, seed=5)
    revisions.append(resolve_model(Weights(str(folder), f"{one}")).spec.revision)
    assert len(set(revisions)) == 5
    assert all(revision.startswith(revisions[0]) for revision in revisions)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("nowhere.safetensors", "no such file or folder, and not a hub id"),
        ("{file},,{file}", "a comma without a LoRA"),
        ("{file}=0", "strength `0`"),
        ("=0.8", "a strength without a LoRA"),
        ("/dev/null", "neither a file nor a folder"),
        ("{folder}/deep.safetensors", "not a safetensors file, or cut short"),
        ("{file}=much", "strength `much`"),
        ("{file}=nan", "strength `nan`"),
        ("{file}=1e9", "strength `1e9`"),
        ("{folder}/none", "0 safetensors files"),
        ("{folder}/two", "2 safetensors files"),
        ("{folder}/text.safetensors", "not a safetensors file, or cut short"),
        ("{folder}/short.safetensors", "not a safetensors file, or cut short"),
        ("{folder}/most.safetensors", "not a safetensors file, or cut short"),
        ("{folder}/empty.safetensors", "not a safetensors file, or cut short"),
        ("{folder}/weights.safetensors", "no low-rank updates in it"),
    ],
)
def test_what_is_no_lora_is_refused(written: str, message: str, weight: torch.Tensor, tmp_path: Path) -> None:
    file = plain_lora(tmp_path / "a.safetensors", weight)
    (tmp_path / "none").mkdir()
    for name in ("one", "other"):
        plain_lora(tmp_path / "two" / f"{name}.safetensors", weight)
    (tmp_path / "text.safetensors").write_text("no weights in here, only words")
    (tmp_path / "short.safetensors").write_bytes(file.read_bytes()[:60])
    (tmp_path / "most.safetensors").write_bytes(file.read_bytes()[:-1])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    deep = b"[" * 200_000
    (tmp_path / "deep.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    lora_file(tmp_path / "weights.safetensors", {"transformer.x.weight": weight})
    with pytest.raises(ModelError, match=message):
        find_loras(written.format(file=file, folder=tmp_path))


def test_a_folder_is_its_usual_file(weight: torch.Tensor, tmp_path: Path) -> None:
    usual = plain_lora(tmp_path / "pytorch_lora_weights.safetensors", weight)
    plain_lora(tmp_path / "checkpoint-500.safetensors", weight, seed=5)
    assert find_lora(str(tmp_path)).source.files == (usual,)


def test_a_lora_on_the_hub_is_fetched_when_the_model_is_loaded(
    folder: Path, weight: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_lora(tmp_path / "style" / "a.safetensors", weight)
    plain_lora(tmp_path / "other" / "b.safetensors", weight, seed=5)
    names = frozenset({"README.md", "style/a.safetensors", "other/b.safetensors"})
    snapshot = Snapshot(folder=tmp_path, commit=COMMIT, files=names)
    monkeypatch.setattr(lora_files, "fetch_configs", lambda repo, *, revision: snapshot)
    monkeypatch.setattr(lora_files, "fetch_tensor_shapes", lambda repo, *, commit, name: None)
    fetched: list[tuple[str, str, list[str]]] = []

    def fetch(repo: str, *, commit: str, names: list[str]) -> Path:
        fetched.append((repo, commit, names))
        return tmp_path

    monkeypatch.setattr(lora_module, "fetch_files", fetch)
    for lora in ("org/loras@v2:style", "org/loras:style/a.safetensors"):
        model = resolve_model(Weights(str(folder), lora))
        assert [one.revision for one in model.source.loras] == [f"{COMMIT}:style/a.safetensors"]
    assert fetched == []
    down, up = update(weight, seed=1)
    assert (_module(model).get_parameter(f"{LAYER}.weight") - (weight + up @ down)).abs().max() < 1e-6
    assert fetched == [("org/loras", COMMIT, ["style/a.safetensors"])]
    with pytest.raises(ModelError, match="0 safetensors files"):
        find_lora("org/loras:nothing")


HUB_LORA = """
import sys
from manifests.errors import ModelError
from manifests.job import Weights
from pipeline.models.resolve import resolve_model
try:
    resolve_model(Weights(sys.argv[1], "org/loras:style"))
except ModelError as error:
    print(error.message)
print([name for name in ("torch", "diffusers") if name in sys.modules])
"""


def test_a_lora_on_the_hub_is_judged_by_its_header(folder: Path, tmp_path: Path) -> None:
    wide = lora_of_all_layers(wan_layers(config_of(folder) | {"num_attention_heads": 3}))
    lora_file(tmp_path / "hub" / "style" / "a.safetensors", wide)
    (tmp_path / "hub" / "config.json").write_text("{}")
    with serve_hub(tmp_path / "hub", repo="org/loras") as (address, _):
        environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        told, heavy = run_python(HUB_LORA, str(folder), environment=environment).splitlines()
    assert told.startswith("the LoRA changes ")
    assert told.endswith(": style/a.safetensors")
    assert heavy == "[]"
