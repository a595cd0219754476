"""Looking a model up: what is told of it, and what is told of one that cannot be had."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import ModelError
from pipeline.models import tiny
from pipeline.models.families import WAN_NEGATIVE_PROMPT
from pipeline.models.resolve import resolve_model
from pipeline.models.revision import CACHED_FROM_BYTES
from tests.pipeline_hub import COMMIT, run_python, serve_hub

TINY = Path(tiny.__file__).parent

# What the published checkpoints' configs say, as far as it matters here.
FAMILIES: dict[str, dict[str, Any]] = {
    "Wan2.1-T2V-1.3B": {"transformer": {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}},
    "Wan2.1-T2V-14B": {"transformer": {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}},
    "Wan2.2-T2V-A14B": {
        "model_index": {
            "boundary_ratio": 0.875,
            "transformer_2": ["diffusers", "WanTransformer3DModel"],
        },
        "transformer": {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824},
    },
    "Wan2.2-TI2V-5B": {
        "model_index": {"expand_timesteps": True},
        "transformer": {"num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336},
        "vae": {"z_dim": 48, "scale_factor_spatial": 16, "patch_size": 2, "is_residual": True},
        "scheduler": {"flow_shift": 5.0},
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the built-in checkpoint, without its own defaults."""
    copy = tmp_path / "model"
    shutil.copytree(TINY, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__", "vgbatch.json"))
    return copy


@pytest.fixture
def large_file(folder: Path) -> Path:
    """Weights whose digest is worth keeping; a hole in the file, so quick to make."""
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    os.truncate(file, CACHED_FROM_BYTES)
    return file


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def make_family(folder: Path, name: str) -> Path:
    """The configs of a published family over files that nobody reads when planning."""
    changes = FAMILIES[name]
    edit(folder / "transformer" / "config.json", **{"in_channels": 16, **changes.get("transformer", {})})
    edit(folder / "vae" / "config.json", **{"z_dim": 16, **changes.get("vae", {})})
    edit(folder / "scheduler" / "scheduler_config.json", **changes.get("scheduler", {}))
    edit(folder / "model_index.json", **changes.get("model_index", {}))
    if "transformer_2" in changes.get("model_index", {}):
        shutil.copytree(folder / "transformer", folder / "transformer_2")
    return folder


@pytest.mark.parametrize(
    ("family", "size", "num_frames", "fps", "steps", "guidance", "guidance_2", "flow_shift", "multiple"),
    [
        ("Wan2.1-T2V-1.3B", (832, 480), 81, 16, 50, 5.0, None, 3.0, 16),
        ("Wan2.1-T2V-14B", (832, 480), 81, 16, 50, 5.0, None, 3.0, 16),
        ("Wan2.2-T2V-A14B", (1280, 720), 81, 16, 40, 4.0, 3.0, 3.0, 16),
        ("Wan2.2-TI2V-5B", (1280, 704), 121, 24, 50, 5.0, None, 5.0, 32),
    ],
)
def test_published_families_get_their_published_defaults(
    folder: Path,
    family: str,
    size: tuple[int, int],
    num_frames: int,
    fps: int,
    steps: int,
    guidance: float,
    guidance_2: float | None,
    flow_shift: float,
    multiple: int,
) -> None:
    spec = resolve_model(str(make_family(folder, family))).spec
    assert (spec.default_width, spec.default_height) == size
    assert (spec.default_num_frames, spec.default_fps, spec.default_steps) == (num_frames, fps, steps)
    assert (spec.default_guidance_scale, spec.default_guidance_scale_2) == (guidance, guidance_2)
    assert (spec.default_flow_shift, spec.two_experts) == (flow_shift, guidance_2 is not None)
    assert (spec.multiple, spec.patch_pixels, spec.temporal) == (multiple, multiple, 4)
    assert (spec.engine, spec.max_tokens) == ("wan", 512)
    assert spec.default_negative_prompt == WAN_NEGATIVE_PROMPT


@pytest.mark.parametrize(("family", "height_720p"), [("Wan2.1-T2V-14B", 720), ("Wan2.2-TI2V-5B", 704)])
def test_named_resolutions_are_sizes_the_model_renders_whole(
    folder: Path, family: str, height_720p: int
) -> None:
    spec = resolve_model(str(make_family(folder, family))).spec
    assert spec.resolutions["480p"] == (832, 480)
    assert spec.resolutions["720p"] == (1280, height_720p)
    assert spec.resolutions["768p"] == (1344, 768)
    assert spec.resolutions["720p-portrait"] == (height_720p, 1280)
    for width, height in spec.resolutions.values():
        assert width % spec.multiple == height % spec.multiple == 0
        assert spec.min_side <= min(width, height) <= max(width, height) <= spec.max_side


def test_the_cap_follows_the_tokens_of_a_clip(folder: Path) -> None:
    cap = resolve_model(str(make_family(folder, "Wan2.2-TI2V-5B"))).spec.cap
    assert cap(1344, 768, 121) == 1  # 31,248 tokens
    assert cap(256, 160, 33) == 8  # 360
    assert cap(512, 320, 25) == 8  # 1,120
    assert cap(512, 320, 49) == 4  # 2,080


def test_limits_stay_within_the_transformers_positions(folder: Path) -> None:
    edit(folder / "transformer" / "config.json", rope_max_seq_len=20)
    spec = resolve_model(str(folder)).spec
    assert (spec.max_side, spec.max_frames) == (20 * 16, 19 * 4 + 1)


def test_a_flow_match_euler_scheduler_gives_its_shift(folder: Path) -> None:
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 8.0}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    assert resolve_model(str(folder)).spec.default_flow_shift == 8.0


def test_a_checkpoint_may_bring_its_own_defaults(folder: Path) -> None:
    own = {"display_name": "studio look", "fps": "24000/1001", "steps": 4, "resolutions": {"wide": [256, 96]}}
    (folder / "vgbatch.json").write_text(json.dumps(own))
    model = resolve_model(str(folder))
    assert model.display_name == "studio look"
    assert model.spec.default_fps == Fraction(24000, 1001)
    assert (model.spec.default_steps, model.spec.default_width) == (4, 832)
    assert model.spec.resolutions == {"wide": (256, 96)}


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("stepz", 4, "steps"),
        ("steps", 0, "whole number of at least 1"),
        ("steps", True, "whole number"),
        ("width", "64", "whole number"),
        ("fps", "0", "rate from 1 to 240"),
        ("fps", "1/0", "rate from 1 to 240"),
        ("guidance_scale", -1, "number of at least 0"),
        ("negative_prompt", None, "a text"),
        ("resolutions", {"wide": [256]}, "names with"),
        ("resolutions", [256, 96], "names with"),
    ],
)
def test_a_wrong_own_default_names_key_value_and_what_is_valid(
    folder: Path, key: str, value: Any, valid: str
) -> None:
    (folder / "vgbatch.json").write_text(json.dumps({key: value}))
    with pytest.raises(ModelError) as caught:
        resolve_model(str(folder))
    assert key in caught.value.message
    assert "vgbatch.json" in caught.value.message
    assert valid in f"{caught.value.message} {caught.value.hint}"


def test_folders_aliases_and_relative_paths_find_the_same_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    whole = resolve_model(str(folder))
    for name, aliases in (("./model", {}), ("model", {}), ("studio", {"studio": str(folder)})):
        found = resolve_model(name, aliases=aliases)
        assert found.spec.name == found.source.weights.model == name
        assert (found.source.folder, found.source.revision) == (folder, whole.source.revision)
        assert found.spec.revision == found.source.revision


def test_a_pinned_revision_does_not_hide_that_a_folder_has_changed(folder: Path) -> None:
    assert resolve_model(str(folder), pinned_revision="0" * 40).source.revision != "0" * 40


# What is wrong with a folder, and words its message must hold.
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda folder: shutil.rmtree(folder) or folder.mkdir(), "no model_index.json"),
    "index is no JSON": (lambda folder: (folder / "model_index.json").write_text("{"), "model_index.json"),
    "index is a list": (lambda folder: (folder / "model_index.json").write_text("[]"), "no JSON object"),
    "config is no text": (
        lambda folder: (folder / "vae" / "config.json").write_bytes(b"\xff\xfe"),
        "config.json cannot be read",
    ),
    "another pipeline": (
        lambda folder: edit(folder / "model_index.json", _class_name="StableDiffusionPipeline"),
        "`StableDiffusionPipeline` is not WanPipeline",
    ),
    "no vae folder": (lambda folder: shutil.rmtree(folder / "vae"), "vae/ is missing"),
    "no vae at all": (lambda folder: edit(folder / "model_index.json", vae=[None, None]), "names no vae"),
    "no second expert": (
        lambda folder: edit(folder / "model_index.json", boundary_ratio=0.875),
        "names no transformer_2",
    ),
    "boundary is no number": (
        lambda folder: (
            shutil.copytree(folder / "transformer", folder / "transformer_2"),
            edit(
                folder / "model_index.json",
                boundary_ratio="0.875",
                transformer_2=["diffusers", "WanTransformer3DModel"],
            ),
        ),
        "boundary_ratio",
    ),
    "pickled weights": (
        lambda folder: (folder / "transformer" / "diffusion_pytorch_model.safetensors").rename(
            folder / "transformer" / "diffusion_pytorch_model.bin"
        ),
        "no safetensors weights in transformer/, only diffusion_pytorch_model.bin",
    ),
    "no weights": (
        lambda folder: (folder / "text_encoder" / "model.safetensors").unlink(),
        "no safetensors weights in text_encoder/:",
    ),
    "a lost shard": (
        lambda folder: (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "part-1-of-2.safetensors", "b": "part-2-of-2.safetensors"}})
        ),
        "2 of 2 weight files are missing from transformer/, first part-1-of-2.safetensors",
    ),
    "no config": (lambda folder: (folder / "vae" / "config.json").unlink(), "vae/config.json is missing"),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(),
        "neither tokenizer.json nor spiece.model",
    ),
    "image-to-video": (
        lambda folder: edit(folder / "transformer" / "config.json", in_channels=36),
        "image-to-video",
    ),
    "image embeddings": (
        lambda folder: edit(folder / "transformer" / "config.json", image_dim=1280),
        "image-to-video",
    ),
    "another transformer": (
        lambda folder: edit(folder / "transformer" / "config.json", _class_name="LTXVideoTransformer3DModel"),
        "`LTXVideoTransformer3DModel`",
    ),
    "patches in time": (
        lambda folder: edit(folder / "transformer" / "config.json", patch_size=[2, 2, 2]),
        "patch_size [2, 2, 2]",
    ),
    "scale is text": (
        lambda folder: edit(folder / "vae" / "config.json", scale_factor_spatial="8"),
        "scale_factor_spatial of the vae is not a number above 0, '8'",
    ),
    "another scheduler": (
        lambda folder: edit(folder / "scheduler" / "scheduler_config.json", _class_name="DDIMScheduler"),
        "is 'DDIMScheduler', not UniPCMultistepScheduler or FlowMatchEulerDiscreteScheduler",
    ),
    "no flow matching": (
        lambda folder: edit(folder / "scheduler" / "scheduler_config.json", use_flow_sigmas=False),
        "use_flow_sigmas of the checkpoint's scheduler is False, not True",
    ),
    "dynamic shifting": (
        lambda folder: edit(folder / "scheduler" / "scheduler_config.json", use_dynamic_shifting=True),
        "use_dynamic_shifting of the checkpoint's scheduler is True, not off",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_checkpoint_is_told_before_any_weight_loads(folder: Path, fault: str) -> None:
    break_it, words = BROKEN[fault]
    break_it(folder)
    with pytest.raises(ModelError) as caught:
        resolve_model(str(folder))
    assert words in caught.value.message
    assert str(folder) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./no-such", "../no/such", "", "wan", "a b/c", "x" * 5000, "a\0b"]
)
def test_a_name_that_is_neither_folder_nor_hub_id_says_what_one_is(name: str) -> None:
    with pytest.raises(ModelError, match="not a hub id") as caught:
        resolve_model(name)
    assert "org/name@revision" in str(caught.value.hint)


def test_a_single_weights_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "wan.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="a file, not a diffusers checkpoint folder"):
        resolve_model(str(file))


def test_an_alias_that_leads_nowhere_names_both(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"studio \(/no/such\)"):
        resolve_model("studio", aliases={"studio": "/no/such"})


def test_the_revision_is_of_the_contents_of_what_makes_the_model(folder: Path, tmp_path: Path) -> None:
    first = resolve_model(str(folder)).source.revision
    (folder / "README.md").write_text("another model card")
    (folder / "vae" / ".DS_Store").write_text("left by a file manager")
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert resolve_model(str(folder)).source.revision == first
    assert resolve_model(str(moved)).source.revision == first

    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert resolve_model(str(folder)).source.revision != first


def test_large_files_are_hashed_once(
    folder: Path, large_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = resolve_model(str(folder)).source.revision
    (cache,) = (tmp_path / "cache" / "vgbatch").iterdir()
    kept = json.loads(cache.read_text())
    assert list(kept) == [str(large_file)]

    kept[str(large_file)][-1] = "another digest"
    cache.write_text(json.dumps(kept))
    assert resolve_model(str(folder)).source.revision != first  # so it was the kept one that counted
    os.utime(large_file, ns=(1, 1))
    assert resolve_model(str(folder)).source.revision == first


@pytest.mark.parametrize("content", ["", "[]", "not JSON", '{"x": 1}', '{"FILE": 1}', '{"FILE": [16000000]}'])
def test_a_damaged_cache_is_ignored(
    folder: Path, large_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = resolve_model(str(folder)).source.revision
    cache = tmp_path / "vgbatch" / "file-digests.json"
    cache.write_text(content.replace("FILE", str(large_file)))
    assert resolve_model(str(folder)).source.revision == first


RESOLVE = """
import json, sys
from manifests.errors import ModelError
from pipeline.models.resolve import resolve_model
found = {}
for name in sys.argv[1:]:
    try:
        model = resolve_model(name)
        counts = list(model.spec.count_tokens(["a cat"]))
        found[name] = [str(model.source.folder), model.source.revision, counts]
    except ModelError as error:
        found[name] = error.message
heavy = [name for name in ("torch", "diffusers", "transformers", "pyarrow", "duckdb") if name in sys.modules]
print(json.dumps([found, heavy]))
"""


def resolve_elsewhere(*names: str, **environment: str) -> tuple[dict[str, Any], list[str]]:
    """What another process, with just this environment, finds; and which heavy libraries it loaded."""
    found, heavy = json.loads(run_python(RESOLVE, *names, environment=environment))
    return found, heavy


def test_resolving_loads_no_heavy_library() -> None:
    found, heavy = resolve_elsewhere("builtin")
    assert found["builtin"][1] == resolve_model("builtin").source.revision
    assert heavy == []


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_a_cache_that_cannot_be_written_costs_time_only(
    folder: Path, large_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    found, _ = resolve_elsewhere(str(folder), **{variable: "/dev/null"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert found[str(folder)][1] == resolve_model(str(folder)).source.revision


@pytest.fixture
def hub_home(tmp_path: Path) -> str:
    return str(tmp_path / "hub-cache")


FETCH_WEIGHTS = """
import sys
from pipeline.models.hub import fetch_weights
print(fetch_weights(sys.argv[1], commit=sys.argv[2]))
"""


def test_a_hub_model_is_pinned_to_its_commit_and_its_weights_come_later(folder: Path, hub_home: str) -> None:
    with serve_hub(folder, repo="org/wan") as (address, fetched):
        environment = {"HF_ENDPOINT": address, "HF_HOME": hub_home}
        found, heavy = resolve_elsewhere("org/wan", f"org/wan@{COMMIT}", **environment)
        assert found["org/wan"] == found[f"org/wan@{COMMIT}"]
        snapshot, revision, counts = found["org/wan"]
        assert (revision, counts, heavy) == (COMMIT, [3], [])
        assert "tokenizer/tokenizer.json" in fetched
        assert not any(name.endswith(".safetensors") for name in fetched)

        loaded = run_python(FETCH_WEIGHTS, "org/wan", COMMIT, environment=environment)
        assert loaded.strip() == snapshot
        assert sum(name.endswith(".safetensors") for name in fetched) == 3

    offline, _ = resolve_elsewhere("org/wan", **environment)
    assert offline["org/wan"] == found["org/wan"]
    assert resolve_model(snapshot).spec.default_width == 832


def test_what_the_hub_does_not_have_is_told_apart(folder: Path, hub_home: str) -> None:
    with serve_hub(folder, repo="org/wan") as (address, _):
        found, _ = resolve_elsewhere("org/wan@v9", "org/none", HF_ENDPOINT=address, HF_HOME=hub_home)
    assert found["org/wan@v9"] == "the hub has no such revision of the model: org/wan@v9"
    assert found["org/none"] == "neither a local folder nor a model on the hub: org/none"


def test_hub_weights_that_are_not_safetensors_are_refused_before_they_are_fetched(
    folder: Path, hub_home: str
) -> None:
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with serve_hub(folder, repo="org/wan") as (address, fetched):
        found, _ = resolve_elsewhere("org/wan", HF_ENDPOINT=address, HF_HOME=hub_home)
    assert "only diffusion_pytorch_model.bin: org/wan" in found["org/wan"]
    assert not any(name.endswith((".bin", ".safetensors")) for name in fetched)


def test_an_unreachable_hub_is_told(hub_home: str) -> None:
    found, _ = resolve_elsewhere("org/wan", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=hub_home)
    assert "the hub cannot be reached" in found["org/wan"]
    assert found["org/wan"].endswith(": org/wan")
