"""`vgbatch verify` with the fake engine: what is rendered, compared, decided, kept and shown."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from jobs.lock import run_lock
from jobs.verification.sides import _skipped_frac
from jobs.verification.table import notes
from jobs.verification.verify import Verification, _manifest_rows, verify
from manifests.errors import Busy, ManifestError, UnreadableManifest, UsageError
from pipeline.config import NUMERICS
from storage.ledger import Ledger
from storage.video import probe
from tests.fake_engine import Knobs, read_log
from tests.run_cases import Row, command, query, rows_of, settings_for, write_manifest

ROWS = rows_of("a", "b", "c")
BUILTIN = Path(__file__).parent.parent / "pipeline" / "models" / "tiny"


def verified(
    folder: Path, rows: list[Row] | pa.Table | None = ROWS, *, knobs: Knobs | None = None, **given: Any
) -> Verification:
    """One whole verification in this process, its workers spawned. given: of `verify`, and flags."""
    options = {
        name: given.pop(name) for name in ("against", "against_model", "lora", "num_clips") if name in given
    }
    console = given.pop("console", None) or Console(quiet=True)
    return verify(
        settings_for(folder, **{"preset": "fast", **given}),
        manifest=None if rows is None else str(write_manifest(folder, rows)),
        console=console,
        factory=(knobs or Knobs()).renderer(),
        **options,
    )


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Verification]:
    """The folder and the verdict of clips that are equal."""
    folder = tmp_path_factory.mktemp("same")
    return folder, verified(folder)


@pytest.fixture(scope="module")
def worse(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Verification]:
    """Of clips that are 30 levels too bright."""
    folder = tmp_path_factory.mktemp("worse")
    return folder, verified(folder, knobs=Knobs(brighter={"fast": 30}))


def failed(verification: Verification) -> list[str]:
    return [check["name"] for check in verification.facts["checks"] if check["passed"] is False]


def test_equal_clips_pass_and_both_sides_are_delivered(same: tuple[Path, Verification]) -> None:
    folder, found = same
    facts = found.facts
    assert (found.passed, found.exit_code, failed(found)) == (True, 0, [])
    assert (facts["num_clips"], facts["num_identical"], facts["num_missing"]) == (3, 3, 0)
    assert "3 of 3 clips are equal to the last bit: preset fast changed nothing here" in notes(facts)
    assert (facts["psnr_db"]["median"], facts["ssim"]["median"]) == (None, pytest.approx(1))
    for clip in facts["clips"]:
        files = [clip[side]["file"] for side in ("reference", "candidate")]
        assert [Path(file).parts[:2] for file in files] == [("verify", "reference"), ("verify", "candidate")]
        assert [probe(folder / "out" / file).num_frames for file in files] == [5, 5]


def test_frames_are_compared_before_any_encoder_and_then_removed(tmp_path: Path) -> None:
    found = verified(tmp_path, knobs=Knobs(brighter={"fast": 3}), crf=51)
    # Two thirds of all samples, each 3 levels away: nothing that crf 51 would have left.
    assert found.facts["psnr_db"]["median"] == pytest.approx(40.3486, abs=1e-3)
    assert found.facts["psnr_db"]["least"] == found.facts["psnr_db"]["most"]
    assert list((tmp_path / "out" / "verify").rglob("*.i420")) == []


def test_both_sides_have_the_same_noise_whatever_else_a_row_says(tmp_path: Path) -> None:
    rows = [{"prompt": f"prompt {n}", "width": 64, "height": 64, "num_frames": 5} for n in range(3)]
    rows[0] |= {"preset": "fp8", "model": "builtin"}
    found = verified(tmp_path, rows, knobs=Knobs(log=tmp_path / "log", brighter={"fast": 1}))
    assert found.facts["num_clips"] == 3
    assert {clip["psnr_db"] for clip in found.facts["clips"]} == {found.facts["psnr_db"]["median"]}
    batches = read_log(tmp_path / "log")
    assert [sorted(batch["ids"]) for batch in batches] == [sorted(batches[0]["ids"])] * 2
    assert len({clip["seed"] for clip in found.facts["clips"]}) == 3


@pytest.mark.parametrize(
    ("knobs", "preset", "wrong"),
    [
        (Knobs(brighter={"fp8": 12}), "fp8", ["median PSNR"]),
        (Knobs(black_in=frozenset({"turbo"})), "turbo", ["black clips", "frozen clips"]),
    ],
    ids=["unlike", "black"],
)
def test_a_candidate_that_is_worse_fails(tmp_path: Path, knobs: Knobs, preset: str, wrong: list[str]) -> None:
    found = verified(tmp_path, knobs=knobs, preset=preset)
    assert (found.passed, found.exit_code) == (False, 3)
    assert failed(found) == wrong
    assert found.facts["passed"] is False


def test_a_clip_that_only_the_candidate_lacks_has_its_reason(tmp_path: Path) -> None:
    found = verified(tmp_path, ROWS[:1], knobs=Knobs(non_finite_in=frozenset({"fast"})))
    (clip,) = found.facts["clips"]
    assert clip["is_missing"]
    assert clip["reference"]["file"]
    assert clip["candidate"] == {
        "file": None,
        "reason": "non-finite output: 1 pixel; try another seed",
        "shows": None,
    }


def test_a_clip_that_neither_side_has_is_left_out(tmp_path: Path) -> None:
    found = verified(tmp_path, knobs=Knobs(wrong_count_on=frozenset({"b"})))
    assert found.passed
    assert (found.facts["num_clips"], found.facts["num_left_out"], found.facts["num_missing"]) == (2, 1, 0)


def test_the_worst_clips_come_first(tmp_path: Path) -> None:
    rows = [{**row, "seed": seed} for row, seed in zip(ROWS, (0, 1, 83), strict=True)]
    # The last one begins at 223, which 33 more bring past 255 and so to 0.
    found = verified(tmp_path, rows, knobs=Knobs(brighter={"fast": 33}))
    values = [clip["psnr_db"] for clip in found.facts["clips"]]
    assert values == sorted(values)
    assert len(set(values)) > 1


def test_the_verdict_is_in_the_ledger_with_what_it_is_of(worse: tuple[Path, Verification]) -> None:
    folder, found = worse
    assert (found.passed, found.exit_code, failed(found)) == (False, 3, ["median PSNR"])
    ledger = Ledger(folder / "out" / "vgbatch.duckdb")
    candidate = found.facts["candidate"]
    row = ledger.last_verification(
        model_revision=candidate["revision"],
        lora=None,
        preset="fast",
        numerics=NUMERICS,
        gpu_name="fake cpu",
    )
    assert row is not None
    assert (row.verification_id, row.passed, row.num_clips) == (found.facts["verification_id"], False, 3)
    assert (row.model, row.reference_model, row.reference_preset) == ("builtin", "builtin", "exact")
    kept = json.loads(row.result)
    assert kept["psnr_db"] == found.facts["psnr_db"]
    assert "clips" not in kept
    # No run of its own is in the reports.
    assert query(folder, "SELECT count(*) FROM runs") == [(0,)]


def test_another_verification_replaces_the_files_of_the_last(
    same: tuple[Path, Verification], tmp_path: Path
) -> None:
    shutil.copytree(same[0], tmp_path, dirs_exist_ok=True)
    found = verified(tmp_path, ROWS[:1], knobs=Knobs(log=tmp_path / "log"))
    assert [batch["ids"] for batch in read_log(tmp_path / "log")] == [["a"], ["a"]]
    assert found.facts["num_clips"] == 1
    assert len(list((tmp_path / "out" / "verify").rglob("*.mp4"))) == 2
    assert query(tmp_path, "SELECT count(*) FROM verifications") == [(2,)]


def test_a_folder_that_is_not_ours_is_kept(tmp_path: Path) -> None:
    mine = tmp_path / "out" / "verify" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.touch()
    with pytest.raises(UsageError, match="not a folder of `vgbatch verify`"):
        verified(tmp_path)
    assert mine.exists()


def test_captions_of_a_known_truth_are_the_built_in_models_prompts(tmp_path: Path) -> None:
    found = verified(tmp_path, None, num_clips=3)
    facts = found.facts
    assert facts["prompts"] == "held-out captions"
    assert list(facts["adherence"]) == ["colour", "shape", "motion", "all three"]
    assert facts["adherence"]["all three"]["num_clips"] == 3
    # Grey frames show nothing, on either side.
    assert facts["adherence"]["all three"]["candidate_frac"] == 0
    assert [check["note"] for check in facts["checks"]][-1] == "3 clips are too few for it: 68 would do"
    assert all(clip["truth"] and clip["reference"]["shows"] for clip in facts["clips"])


def test_a_manifest_is_cut_at_the_number_of_clips_and_its_wrong_rows_left_out(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "width": 63}, *ROWS[1:], *rows_of("d")]
    found = verified(tmp_path, rows, num_clips=3)
    assert [clip["id"] for clip in sorted(found.facts["clips"], key=lambda clip: clip["id"])] == ["b", "c"]
    assert found.facts["adherence"] is None


def test_two_models_are_compared_on_the_rows_that_both_can_render(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "narrow"
    shutil.copytree(BUILTIN, model, ignore=shutil.ignore_patterns("*.py", "*.log", "few_step"))
    limits = json.loads((model / "vgbatch.json").read_text())
    (model / "vgbatch.json").write_text(json.dumps({**limits, "max_side": 64, "flow_shift": 5.0}))
    rows = [{**ROWS[0], "width": 63}, ROWS[1], {**ROWS[2], "width": 128}]
    found = verified(
        tmp_path,
        rows,
        model=str(model),
        against_model="builtin",
        preset="exact",
        console=Console(stderr=True),
    )
    said = capsys.readouterr().err
    assert "manifest.parquet row 0 (id 'a')" in said
    assert "manifest.parquet row 2 (id 'c')" in said
    assert [clip["id"] for clip in found.facts["clips"]] == ["b"]
    sides = [found.facts[name] for name in ("reference", "candidate")]
    assert [side["model"] for side in sides] == ["builtin", str(model)]
    assert sides[0]["revision"] != sides[1]["revision"]
    assert found.passed
    assert [check["name"] for check in found.facts["checks"]] == [
        "compared clips",
        "clips without frames",
        "black clips",
        "frozen clips",
        "adherence lost",
        "adherence lost, 95 % bound",
    ]


def test_loras_of_rows_are_said_to_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**ROWS[0], "lora": "style.safetensors"}]
    verified(tmp_path, rows, preset="exact", console=Console(stderr=True))
    assert "column lora of" in capsys.readouterr().err


def test_a_few_step_checkpoint_is_not_compared_with_itself(tmp_path: Path) -> None:
    model = tmp_path / "student"
    shutil.copytree(BUILTIN, model, ignore=shutil.ignore_patterns("*.py", "*.log", "few_step"))
    (model / "few_step.toml").write_text('name = "s"\nsampler = "euler"\nsigmas = [1, 0.5]\n')
    with pytest.raises(UsageError, match=r"nothing to compare with: .*student is a few-step"):
        verified(tmp_path, ROWS[:1], model=str(model), preset="turbo", knobs=Knobs(log=tmp_path / "log"))
    assert not (tmp_path / "log").exists()


def test_a_style_is_on_both_sides_of_turbo(tmp_path: Path) -> None:
    style = tmp_path / "style.safetensors"
    layer, channels = "transformer.blocks.0.attn1.to_q", 192  # of the built-in model
    down, up = torch.ones(2, channels), torch.ones(channels, 2)
    save_file({f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}, style)
    found = verified(tmp_path, ROWS[:1], lora=str(style), preset="turbo")
    assert [found.facts[side]["lora"] for side in ("reference", "candidate")] == [str(style)] * 2


def test_parts_of_a_manifest_are_one_prompt_set(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for number, row in enumerate(ROWS):
        write_manifest(folder, [row], name=f"{number}.parquet")
    rows = _manifest_rows(str(folder), 2)
    assert rows["id"].to_pylist() == ["a", "b"]
    assert _manifest_rows(str(folder), None)["id"].to_pylist() == ["a", "b", "c"]
    write_manifest(folder, pa.table({"prompt": ["p"], "seed": [[1]]}), name="9.parquet")
    with pytest.raises(UnreadableManifest, match="parts"):
        _manifest_rows(str(folder), None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"against": "fats"}, "--against: fats"),
        ({"preset": "fats"}, "--preset: 'fats'"),
        ({"rows": pa.table({"prompt": pa.array([], pa.string())})}, "nothing to compare"),
        ({"rows": [{**ROWS[0], "width": 63}]}, "nothing to compare: the reference cannot render any row"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_rendered(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        verified(tmp_path, knobs=Knobs(log=tmp_path / "log"), **given)
    assert not (tmp_path / "log").exists()


def test_a_manifest_that_cannot_be_read_is_an_error_of_the_manifest(tmp_path: Path) -> None:
    with pytest.raises(ManifestError):
        verified(tmp_path, pa.table({"no_prompt": [1]}))


def test_a_run_at_work_keeps_a_verification_out(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    lock = run_lock(out=tmp_path / "out", ledger=tmp_path / "out" / "vgbatch.duckdb", run_id="r")
    with lock, pytest.raises(Busy):
        verified(tmp_path)


# ---- the command ------------------------------------------------------------------------------------


def vgbatch(*args: str, folder: Path, knobs: str = "Knobs()") -> tuple[int, str, str]:
    process = command(*args, folder=folder, knobs=knobs)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_the_command_prints_a_table_and_exits_as_the_gate_says(tmp_path: Path) -> None:
    write_manifest(tmp_path, ROWS)
    knobs = "Knobs(brighter={'fast': 30})"
    code, out, err = vgbatch("verify", "manifest.parquet", "--preset", "fast", folder=tmp_path, knobs=knobs)
    assert code == 3, err
    cells = [entry.split() for entry in out.splitlines()]
    assert ["median", "PSNR", "20.35", "dB", "at", "least", "25", "dB", "FAILED"] in cells
    page = tmp_path / "out" / "verify.html"
    assert out.splitlines()[-1] == f"failed: median PSNR; the clips side by side, worst first: {page}"
    assert page.exists()
    assert "never verified" not in err


def test_json_is_what_the_file_holds(tmp_path: Path) -> None:
    write_manifest(tmp_path, ROWS)
    code, out, err = vgbatch("verify", "manifest.parquet", "--clips", "1", "--json", folder=tmp_path)
    assert code == 0, err
    facts = json.loads(out)
    assert facts == json.loads((tmp_path / "out" / "verify.json").read_text(encoding="utf-8"))
    assert (facts["num_clips"], facts["candidate"]["preset"], facts["passed"]) == (1, "exact", True)


def test_unusable_arguments_are_exit_2_with_what_was_meant(tmp_path: Path) -> None:
    code, _, err = vgbatch("verify", "--against", "fats", folder=tmp_path)
    assert (code, err.splitlines()[0]) == (2, "error: --against: fats")
    assert "did you mean fast?" in err


def test_ctrl_c_ends_it_without_a_verdict(tmp_path: Path) -> None:
    write_manifest(tmp_path, ROWS)
    os.mkfifo(tmp_path / "log")
    knobs = f"Knobs(hang_on=frozenset({{'a'}}), log=Path({str(tmp_path / 'log')!r}))"
    process = command("verify", "manifest.parquet", folder=tmp_path, knobs=knobs)
    assert process.stderr is not None
    with open(os.open(tmp_path / "log", os.O_RDWR), encoding="utf-8") as log:
        assert any('"ids"' in entry for entry in log)  # the batch that hangs is on the device
    process.send_signal(signal.SIGINT)
    assert any("a second signal stops at once" in said for said in process.stderr)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == "stopped by SIGINT: nothing is verified, the same command begins anew\n"
    assert not (tmp_path / "out" / "verify.json").exists()
    assert query(tmp_path, "SELECT count(*) FROM verifications") == [(0,)]
    assert list((tmp_path / "out" / "verify").rglob("frames")) == []


def test_steps_that_were_skipped_are_a_share_of_all() -> None:
    batch = {"num_clips": 2, "device_s": 1.0}
    skipping = {**batch, "steps_computed": 15, "steps_skipped": 5}
    assert _skipped_frac([skipping, {**skipping, "steps_computed": 20, "steps_skipped": 0}]) == 0.125
    assert _skipped_frac([{**batch, "steps_computed": 0, "steps_skipped": 0}]) is None
