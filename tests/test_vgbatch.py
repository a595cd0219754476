import subprocess
import sys
import tomllib

import pytest

import vgbatch
from tests.run_cases import ROOT, rows_of, write_manifest


def test_public_names_are_documented_and_there():
    assert vgbatch.__all__ == ["VgbatchError", "main", "plan", "report", "run"]
    assert all(getattr(vgbatch, name).__doc__ for name in vgbatch.__all__)


def test_the_api_does_what_the_command_line_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = rows_of("a", "b", width=16, height=16, steps=1)
    plan = vgbatch.plan(write_manifest(tmp_path, rows), devices="cpu")
    assert plan.jobs["id"].to_pylist() == ["a", "b"]
    summary = vgbatch.run("manifest.parquet", devices="cpu", out="clips")
    assert (summary.num_delivered, summary.exit_code) == (2, 0)
    report = vgbatch.report(out="clips", gpu_price="3.6")
    assert report.total.cost is not None


def test_an_unknown_setting_is_named_with_the_known_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(vgbatch.VgbatchError, match="outt") as raised:
        vgbatch.plan("manifest.parquet", outt="clips")
    assert "encoder_preset" in str(raised.value.hint)


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "vgbatch", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "manifest" in done.stdout


def test_an_installed_package_has_the_data_that_the_code_reads():
    """Files that are no code, of every package, are named in pyproject.toml, or a wheel would lack them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = {
        file
        for package, patterns in settings["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for file in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    packages = ("pipeline", "jobs", "cost", "storage", "manifests")
    data = {
        file
        for package in packages
        for file in (ROOT / package).rglob("*")
        if file.suffix in {".toml", ".json", ".safetensors", ".parquet", ".html"}
    }
    assert ROOT / "pipeline" / "sampling" / "recipes.toml" in data
    assert data <= named
