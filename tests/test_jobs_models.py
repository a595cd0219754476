"""Whole runs over real checkpoint folders, with the real engine in the workers."""

import json
import shutil

import pytest
from typer.testing import CliRunner

import jobs.models
import vgbatch
from jobs.cli import app
from manifests.errors import ModelError
from pipeline.models.resolve import resolve_model
from tests.pipeline_checkpoints import SHORT, build_checkpoint
from tests.run_cases import clips_list, query, write_manifest


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: build_checkpoint(folder / kind, kind) for kind in ("ti2v", "a14b")}


def rows_for(checkpoints):
    shared = {"prompt": SHORT, "seed": 5, "width": 32, "height": 32, "num_frames": 5, "steps": 2}
    models = {"two": str(checkpoints["a14b"]), "five": str(checkpoints["ti2v"]), "small": None}
    rows = [{"id": id, "model": model, **shared} for id, model in models.items()]
    rows[0] |= {"guidance_scale": 4.0, "guidance_scale_2": 3.0}
    return rows


def test_one_manifest_may_name_several_models(tmp_path, monkeypatch, checkpoints):
    monkeypatch.chdir(tmp_path)
    summary = vgbatch.run(write_manifest(tmp_path, rows_for(checkpoints)), devices="cpu")
    assert (summary.num_delivered, summary.exit_code) == (3, 0)
    recorded = dict(query(tmp_path, "SELECT id, model_revision FROM clips"))
    revisions = {
        "two": resolve_model(str(checkpoints["a14b"])).spec.revision,
        "five": resolve_model(str(checkpoints["ti2v"])).spec.revision,
        "small": resolve_model("builtin").spec.revision,
    }
    assert recorded == revisions
    assert query(tmp_path, "SELECT guidance_scale_2 FROM jobs WHERE id = 'two'") == [(3.0,)]
    times = query(
        tmp_path, "SELECT load_s > 0, encode_s > 0, denoise_s > 0, decode_s > 0, write_s > 0 FROM batches"
    )
    assert times == [(True,) * 5] * 3


def test_a_model_that_is_not_there_stops_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manifest = write_manifest(tmp_path, [{"id": "a", "prompt": SHORT}])
    with pytest.raises(ModelError, match="no-such-folder"):
        vgbatch.run(manifest, model="./no-such-folder", devices="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.parquet"]


def test_a_row_s_unknown_model_rejects_the_row_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared = {"prompt": SHORT, "width": 16, "height": 16, "num_frames": 1, "steps": 1}
    rows = [{"id": "good", "model": None, **shared}, {"id": "bad", "model": "./nowhere", **shared}]
    summary = vgbatch.run(write_manifest(tmp_path, rows), devices="cpu")
    assert (summary.num_delivered, summary.num_rejected, summary.exit_code) == (1, 1, 3)
    assert "nowhere" in clips_list(tmp_path)["bad"]["reason"]


def test_damaged_weights_fail_their_jobs_with_the_reason(tmp_path, monkeypatch, checkpoints):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(checkpoints["ti2v"], tmp_path / "model")
    weights = next((folder / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-64])
    summary = vgbatch.run(
        write_manifest(tmp_path, [{"id": "a", "prompt": SHORT, "width": 32, "height": 32, "num_frames": 5}]),
        model=str(folder),
        devices="cpu",
    )
    assert (summary.num_failed, summary.exit_code) == (1, 3)
    assert clips_list(tmp_path)["a"]["reason"]


def test_the_plan_says_which_models_do_not_fit_on_a_card(tmp_path, monkeypatch, checkpoints):
    monkeypatch.chdir(tmp_path)
    manifest = write_manifest(tmp_path, rows_for(checkpoints))
    too_large = {}
    for card_bytes in (1_000, 100_000, 2**40, None):
        monkeypatch.setattr(jobs.models, "smallest_card_bytes", lambda card_bytes=card_bytes: card_bytes)
        result = CliRunner().invoke(app, ["plan", str(manifest), "--json"])
        notes = json.loads(result.stdout)["notes"]
        assert all("every step fetches them from host memory" in note for note in notes)
        too_large[card_bytes] = {note.partition(":")[0] for note in notes}
    everything = {"builtin", str(checkpoints["a14b"]), str(checkpoints["ti2v"])}
    assert too_large == {1_000: everything, 100_000: {"builtin"}, 2**40: set(), None: set()}
