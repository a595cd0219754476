"""LoRAs: found, checked, fused into the weights, exchanged for others, and of every format people have."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from pipeline.models.resolve import ResolvedModel, resolve_model
from pipeline.models.wan import load_wan
from tests.pipeline_checkpoints import build_checkpoint, make_batch, make_job
from tests.pipeline_hub import COMMIT
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
