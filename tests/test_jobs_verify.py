"""`vgbatch verify` with the fake engine: what is rendered, compared, decided, kept and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from jobs.verify import Verification, verify
from manifests.errors import Busy, ManifestError, UsageError
from pipeline.config import NUMERICS
from storage.ledger import Ledger
from storage.video import probe
from tests.fake_engine import Knobs, read_log
from tests.run_cases import Row, command, query, render, rows_of, settings_for, write_manifest

ROWS = rows_of("a", "b", "c")


def verified(
    folder: Path, rows: list[Row] | pa.Table | None = ROWS, *, knobs: Knobs | None = None, **given: Any
) -> Verification:
    """One whole verification in this process, its workers spawned. given: of `verify`, and flags."""
    options = {
        name: given.pop(name) for name in ("against", "against_model", "lora", "num_clips") if name in given
    }
    return verify(
        settings_for(folder, **{"preset": "fast", **given}),
        manifest=None if rows is None else str(write_manifest(folder, rows)),
        console=Console(quiet=True),
        factory=(knobs or Knobs()).renderer(),
        **options,
    )


def failed(verification: Verification) -> list[str]:
    return [check["name"] for check in verification.facts["checks"] if check["passed"] is False]


def test_equal_clips_pass_and_both_sides_are_delivered(tmp_path: Path) -> None:
    found = verified(tmp_path)
    facts = found.facts
    assert (found.passed, found.exit_code, failed(found)) == (True, 0, [])
    assert (facts["num_clips"], facts["num_identical"], facts["num_missing"]) == (3, 3, 0)
    assert (facts["psnr_db"]["median"], facts["ssim"]["median"]) == (None, pytest.approx(1))
    for clip in facts["clips"]:
        files = [clip[side]["file"] for side in ("reference", "candidate")]
        assert [Path(file).parts[:2] for file in files] == [("verify", "reference"), ("verify", "candidate")]
        assert [probe(tmp_path / "out" / file).num_frames for file in files] == [5, 5]


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
        (Knobs(brighter={"fast": 30}), "fast", ["median PSNR"]),
        (Knobs(brighter={"fp8": 12}), "fp8", ["median PSNR"]),
        (Knobs(black_in=frozenset({"turbo"})), "turbo", ["black clips", "frozen clips"]),
        (Knobs(non_finite_in=frozenset({"fast"})), "fast", ["compared clips", "clips without frames"]),
    ],
    ids=["unlike", "stricter", "black", "no frames"],
)
def test_a_candidate_that_is_worse_fails(tmp_path: Path, knobs: Knobs, preset: str, wrong: list[str]) -> None:
    found = verified(tmp_path, knobs=knobs, preset=preset)
    assert (found.passed, found.exit_code) == (False, 3)
    assert failed(found) == wrong
    assert found.facts["passed"] is False


def test_one_clip_that_is_missing_is_named_first_with_its_reason(tmp_path: Path) -> None:
    found = verified(tmp_path, knobs=Knobs(wrong_count_on=frozenset({"b"})))
    assert found.passed  # neither side has a whole clip of it
    assert found.facts["num_left_out"] == 1
    knobs = Knobs(non_finite_in=frozenset({"fast"}), brighter={"exact": 1})
    found = verified(tmp_path, knobs=knobs)
    worst = found.facts["clips"][0]
    assert worst["is_missing"]
    assert worst["candidate"] == {
        "file": None,
        "reason": "non-finite output: 1 pixel; try another seed",
        "shows": None,
    }
    assert worst["reference"]["file"]


def test_the_worst_clips_come_first(tmp_path: Path) -> None:
    rows = [{**row, "seed": seed} for row, seed in zip(ROWS, (0, 1, 83), strict=True)]
    # The last one begins at 223, which 33 more bring past 255 and so to 0.
    found = verified(tmp_path, rows, knobs=Knobs(brighter={"fast": 33}))
    values = [clip["psnr_db"] for clip in found.facts["clips"]]
    assert values == sorted(values)
    assert len(set(values)) > 1


def test_the_verdict_is_in_the_ledger_with_what_it_is_of(tmp_path: Path) -> None:
    found = verified(tmp_path, knobs=Knobs(brighter={"fast": 30}))
    ledger = Ledger(tmp_path / "out" / "vgbatch.duckdb")
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
    assert query(tmp_path, "SELECT count(*) FROM runs") == [(0,)]


def test_another_verification_replaces_the_files_of_the_last(tmp_path: Path) -> None:
    verified(tmp_path)
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"against": "fats"}, "--against: fats"),
        ({"preset": "fats"}, "--preset: 'fats'"),
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
    from jobs.lock import run_lock

    (tmp_path / "out").mkdir()
    lock = run_lock(out=tmp_path / "out", ledger=tmp_path / "out" / "vgbatch.duckdb", run_id="r")
    with lock, pytest.raises(Busy):
        verified(tmp_path)


# ---- what `run` says of presets that were not verified ----------------------------------------------


def warnings_of(folder: Path, capsys: pytest.CaptureFixture[str], **flags: Any) -> list[str]:
    render(folder, ROWS, console=Console(stderr=True, width=300), **flags)
    said = capsys.readouterr().err.splitlines()
    return [text for text in said if "verified" in text]


def test_a_run_names_the_command_until_its_preset_was_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (warning,) = warnings_of(tmp_path, capsys, preset="fast")
    assert warning == (
        "warning: preset fast of builtin was never verified on fake cpu: "
        f"`vgbatch verify --preset fast --model builtin --out {out}`"
    )
    verified(tmp_path, knobs=Knobs(brighter={"fast": 30}))
    (warning,) = warnings_of(tmp_path, capsys, preset="fast", crf=19)
    assert "did not pass when it was last verified on fake cpu" in warning
    verified(tmp_path)
    assert warnings_of(tmp_path, capsys, preset="fast", crf=20) == []


def test_exact_needs_no_verification_and_several_cards_of_a_kind_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert warnings_of(tmp_path, capsys) == []
    assert len(warnings_of(tmp_path, capsys, preset="fast", devices="cpu,cpu")) == 1


# ---- the command ------------------------------------------------------------------------------------


def vgbatch(*args: str, folder: Path, knobs: str = "Knobs()") -> tuple[int, str, str]:
    process = command(*args, folder=folder, knobs=knobs)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_the_command_prints_a_table_and_exits_as_the_gate_says(tmp_path: Path) -> None:
    write_manifest(tmp_path, ROWS)
    code, out, err = vgbatch("verify", "manifest.parquet", "--preset", "fast", folder=tmp_path)
    assert code == 0, err
    assert "3 of 3 clips are equal to the last bit" in out
    assert f"passed; the clips side by side, worst first: {tmp_path / 'out' / 'verify.html'}" in out
    assert "never verified" not in err
    worse = "Knobs(brighter={'fast': 30})"
    code, out, err = vgbatch("verify", "manifest.parquet", "--preset", "fast", folder=tmp_path, knobs=worse)
    assert code == 3, err
    cells = [entry.split() for entry in out.splitlines()]
    assert ["median", "PSNR", "20.35", "dB", "at", "least", "25", "dB", "FAILED"] in cells
    assert out.splitlines()[-1].startswith("failed: median PSNR; ")


def test_json_is_what_the_file_holds_and_bad_arguments_are_exit_2(tmp_path: Path) -> None:
    write_manifest(tmp_path, ROWS)
    code, out, err = vgbatch("verify", "manifest.parquet", "--clips", "1", "--json", folder=tmp_path)
    assert code == 0, err
    facts = json.loads(out)
    assert facts == json.loads((tmp_path / "out" / "verify.json").read_text(encoding="utf-8"))
    assert (facts["num_clips"], facts["candidate"]["preset"]) == (1, "exact")
    code, _, err = vgbatch("verify", "manifest.parquet", "--against", "fats", folder=tmp_path)
    assert (code, err.splitlines()[0]) == (2, "error: --against: fats")
    assert "did you mean fast?" in err


def test_steps_that_were_skipped_are_a_share_of_all(tmp_path: Path) -> None:
    from jobs.verify_sides import _skipped_frac

    batch = {"num_clips": 2, "device_s": 1.0}
    skipping = {**batch, "steps_computed": 15, "steps_skipped": 5}
    assert _skipped_frac([skipping, {**skipping, "steps_computed": 20, "steps_skipped": 0}]) == 0.125
    assert _skipped_frac([{**batch, "steps_computed": 0, "steps_skipped": 0}]) is None
