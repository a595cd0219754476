from __future__ import annotations

import io
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from rich.console import Console

import storage.ffmpeg
from jobs import doctor
from jobs.config import Settings, resolve
from jobs.doctor import Check, config_values, print_checks, print_config, run_checks
from storage.ledger import Ledger
from storage.rows import Outcome
from storage.spool import Spool
from tests.ledger_tables import BATCH, CLIP

ROOT = Path(__file__).parent.parent


def settings_in(folder: Path, **flags: object) -> Settings:
    return resolve({"out": folder / "out", **flags}, environ={}, folder=folder)


def checks_in(
    folder: Path, *, environ: dict[str, str] | None = None, **flags: object
) -> dict[str, list[Check]]:
    """By name."""
    by_name: dict[str, list[Check]] = {}
    for check in run_checks(settings_in(folder, **flags), environ={"HOME": str(folder), **(environ or {})}):
        by_name.setdefault(check.name, []).append(check)
    return by_name


def the(checks: dict[str, list[Check]], name: str) -> Check:
    (check,) = checks[name]
    return check


@pytest.fixture
def other_ffmpeg(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Lets a test choose the ffmpeg. A process chooses once, so that is forgotten before and after."""
    storage.ffmpeg._executable.cache_clear()
    yield monkeypatch
    storage.ffmpeg._executable.cache_clear()


def test_a_sound_machine_has_no_failure_and_nothing_is_left_behind(tmp_path: Path) -> None:
    checks = checks_in(tmp_path)
    assert [check for found in checks.values() for check in found if check.state == "failed"] == []
    assert list(tmp_path.iterdir()) == []
    assert "with libx264" in the(checks, "ffmpeg").detail
    assert "will be made" in the(checks, "out").detail
    assert "made by the first run" in the(checks, "ledger").detail
    assert re.fullmatch(r"\d+\.\d+ GiB", the(checks, "free space").detail)
    assert the(checks, "configuration").detail.startswith("from --out")


def test_every_dependency_is_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [re.split(r"[<>=]", line)[0] for line in project["dependencies"]] == list(doctor.PACKAGES)


def test_a_missing_package_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package-of-ours",))
    check = the(checks_in(tmp_path), "no-such-package-of-ours")
    assert (check.state, check.detail) == ("failed", "not installed")
    assert check.hint


def test_a_card_that_is_not_there_fails_and_names_who_asked(tmp_path: Path) -> None:
    check = the(checks_in(tmp_path, devices="cuda:977"), "devices")
    assert (check.state, check.detail) == ("failed", "not found: cuda:977")
    assert check.hint is not None
    assert check.hint.startswith("--devices asks for them")


def test_an_ffmpeg_that_does_not_start_fails(tmp_path: Path, other_ffmpeg: pytest.MonkeyPatch) -> None:
    other_ffmpeg.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "missing"))
    check = the(checks_in(tmp_path), "ffmpeg")
    assert check.state == "failed"
    assert "IMAGEIO_FFMPEG_EXE" in str(check.hint)


def test_an_ffmpeg_without_libx264_fails(tmp_path: Path, other_ffmpeg: pytest.MonkeyPatch) -> None:
    script = tmp_path / "ffmpeg"
    script.write_text("#!/bin/sh\necho 'ffmpeg version 0 Copyright'\n")
    script.chmod(0o755)
    other_ffmpeg.setenv("IMAGEIO_FFMPEG_EXE", str(script))
    check = the(checks_in(tmp_path), "ffmpeg")
    assert (check.state, check.detail) == ("failed", "ffmpeg version 0, without libx264")


def test_an_output_folder_below_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check = the(checks_in(tmp_path, out=tmp_path / "file" / "out"), "out")
    assert check.state == "failed"
    assert str(tmp_path / "file") in check.detail


def test_little_space_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LOW_SPACE_BYTES", 2**62)
    assert the(checks_in(tmp_path), "free space").state == "warning"


@pytest.mark.parametrize("home", ["", "/"])
def test_no_home_warns_and_names_the_variable(tmp_path: Path, home: str) -> None:
    check = the(checks_in(tmp_path, environ={"HOME": home}), "cache")
    assert check.state == "warning"
    assert "HOME" in check.detail
    assert "HF_HOME" in str(check.hint)


@pytest.mark.parametrize(
    ("variable", "folder"),
    [("HF_HUB_CACHE", "x"), ("HF_HOME", "x/hub"), ("XDG_CACHE_HOME", "x/huggingface/hub")],
)
def test_a_named_cache_needs_no_home(tmp_path: Path, variable: str, folder: str) -> None:
    check = the(checks_in(tmp_path, environ={"HOME": "/", variable: str(tmp_path / "x")}), "cache")
    assert (check.state, check.detail) == ("ok", f"{tmp_path / folder} ({variable})")


def test_a_cache_that_cannot_be_written_warns(tmp_path: Path) -> None:
    check = the(checks_in(tmp_path, environ={"HOME": "/proc/self/nowhere"}), "cache")
    assert (check.state, check.hint) == ("warning", "set HOME to a folder of yours")


def test_a_sound_ledger_is_ok(tmp_path: Path) -> None:
    Ledger(tmp_path / "out" / "vgbatch.duckdb").create()
    assert the(checks_in(tmp_path), "ledger").state == "ok"


def test_a_clip_recorded_twice_fails(tmp_path: Path) -> None:
    path = tmp_path / "out" / "vgbatch.duckdb"
    Ledger(path).create()
    with duckdb.connect(str(path)) as connection:
        for _ in range(2):
            connection.execute(
                "INSERT INTO clips BY NAME SELECT 'r1' AS run_id, 'a' AS id, 'f' AS fingerprint"
            )
        connection.execute("INSERT INTO jobs BY NAME SELECT 'r1' AS run_id, 'a' AS id, 'f' AS fingerprint")
    check = the(checks_in(tmp_path), "ledger")
    assert check.state == "failed"
    assert "2 times" in check.detail


def test_outcomes_in_a_spool_only_warn(tmp_path: Path) -> None:
    path = tmp_path / "out" / "vgbatch.duckdb"
    Ledger(path).create()
    with duckdb.connect(str(path)) as connection:
        connection.execute("INSERT INTO jobs BY NAME SELECT 'r1' AS run_id, 'a' AS id, 'fa' AS fingerprint")
    Spool.new(path).append([Outcome(batch=BATCH, attempts=(), clips=(CLIP,))])
    check = the(checks_in(tmp_path), "ledger")
    assert check.state == "warning"
    assert "spool" in check.detail


def test_a_ledger_that_another_process_would_not_recognise_fails(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "vgbatch.duckdb").write_bytes(b"not a database" * 1000)
    check = the(checks_in(tmp_path), "ledger")
    assert check.state == "failed"
    assert "vgbatch.duckdb" in check.detail


def test_a_misspelt_variable_warns_with_the_near_miss(tmp_path: Path) -> None:
    warning = checks_in(tmp_path, environ={"VGBATCH_GPU_PRCE": "1"})["configuration"][1]
    assert (warning.state, warning.hint) == ("warning", "did you mean VGBATCH_GPU_PRICE?")


def printed(show: object, subject: object, *, as_json: bool) -> str:
    console = Console(file=io.StringIO(), width=40)
    show(subject, console, as_json=as_json)  # type: ignore[operator]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


CHECKS = [
    Check(name="out", state="ok", detail="/data [bold] " + "x" * 80),
    Check(name="ffmpeg", state="failed", detail="none", hint="reinstall"),
]


def test_checks_are_printed_a_line_each_with_their_hints() -> None:
    assert printed(print_checks, CHECKS, as_json=False).splitlines() == [
        "ok       out     /data [bold] " + "x" * 80,
        "failed   ffmpeg  none",
        "                 hint: reinstall",
    ]


def test_checks_as_json() -> None:
    facts = json.loads(printed(print_checks, CHECKS, as_json=True))
    assert facts["checks"][1] == {"name": "ffmpeg", "state": "failed", "detail": "none", "hint": "reinstall"}


def test_configuration_is_shown_with_origins(tmp_path: Path) -> None:
    (tmp_path / "vgbatch.toml").write_text('crf = 20\ntags = ["a", "b"]\n[models]\nbig = "org/name"\n')
    settings = resolve({}, environ={"VGBATCH_GPU_PRICE": "2.50"}, folder=tmp_path)
    values = config_values(settings)
    assert values["crf"] == {"value": "20", "origin": str(tmp_path / "vgbatch.toml")}
    assert values["gpu_price"] == {"value": "2.50", "origin": "VGBATCH_GPU_PRICE"}
    assert values["tags"]["value"] == "a,b"
    assert values["utilization"] == {"value": None, "origin": "default"}
    text = printed(print_config, settings, as_json=False)
    assert re.search(r"^gpu_price +2\.50 +VGBATCH_GPU_PRICE$", text, re.MULTILINE)
    assert re.search(r"^models\.big +org/name$", text, re.MULTILINE)
    facts = json.loads(printed(print_config, settings, as_json=True))
    assert facts == {"settings": values, "models": {"big": "org/name"}}
