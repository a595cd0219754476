"""What a run says of a preset that nobody has verified on its card, and when it is silent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jobs.verification.unverified import Unverified
from manifests.job import Bucket
from pipeline.config import NUMERICS
from storage.ledger import Ledger
from tests.run_cases import render, rows_of, settings_for
from tests.storage_rows import verification_row

BUCKET = Bucket(
    model="tiny",
    revision="rev1",
    preset="fast",
    width=64,
    height=64,
    num_frames=5,
    steps=4,
    guidance_scale=5.0,
    guidance_scale_2=None,
    flow_shift=3.0,
)
VERDICT = verification_row(numerics=NUMERICS)


def warnings(folder: Path, *buckets: Bucket, gpu_name: str = "H200") -> list[str]:
    return unverified(folder, *buckets).warnings(gpu_name)


def unverified(folder: Path, *buckets: Bucket, **flags: Any) -> Unverified:
    settings = settings_for(folder, **flags)
    ledger = Ledger(settings.ledger)
    ledger.create()
    return Unverified(buckets, ledger=ledger, settings=settings)


def record(folder: Path, **changes: Any) -> None:
    ledger = Ledger(folder / "out" / "vgbatch.duckdb")
    ledger.create()
    ledger.add_verification(replace(VERDICT, **changes))


def test_a_preset_that_was_never_verified_comes_with_the_command(tmp_path: Path) -> None:
    assert warnings(tmp_path, BUCKET) == [
        "warning: preset fast of tiny was never verified on H200: "
        f"`vgbatch verify --preset fast --model tiny --out {tmp_path / 'out'}`"
    ]


def test_the_command_names_lora_and_ledger_and_quotes_what_a_shell_would_split(tmp_path: Path) -> None:
    bucket = replace(BUCKET, model="my model", lora="style.safetensors=0.8")
    ledger = tmp_path / "other.duckdb"
    (warning,) = unverified(tmp_path, bucket, ledger=ledger).warnings("H200")
    assert f"--model 'my model' --lora style.safetensors=0.8 --out {tmp_path / 'out'}" in warning
    assert warning.endswith(f"--ledger {ledger}`")


def test_what_has_passed_here_is_not_mentioned_and_what_failed_is(tmp_path: Path) -> None:
    record(tmp_path)
    assert warnings(tmp_path, BUCKET) == []
    assert len(warnings(tmp_path, BUCKET, gpu_name="B200")) == 1
    assert len(warnings(tmp_path, replace(BUCKET, revision="rev2"))) == 1
    record(tmp_path, passed=False, verified_at=VERDICT.verified_at.replace(year=2027))
    (warning,) = warnings(tmp_path, BUCKET)
    assert "preset fast of tiny did not pass when it was last verified on H200" in warning


def test_a_verification_of_few_clips_is_none_to_rely_on(tmp_path: Path) -> None:
    record(tmp_path, num_clips=11)
    (warning,) = warnings(tmp_path, BUCKET)
    assert "was last verified with 11 clips, fewer than 12, on H200: `vgbatch verify" in warning


def test_exact_needs_no_verification(tmp_path: Path) -> None:
    assert warnings(tmp_path, replace(BUCKET, preset="exact")) == []


def test_each_thing_is_said_once(tmp_path: Path) -> None:
    asked = unverified(tmp_path, BUCKET, replace(BUCKET, num_frames=9), replace(BUCKET, preset="fp8"))
    assert len(asked.warnings("H200")) == 2
    assert asked.warnings("H200") == []
    assert len(asked.warnings("B200")) == 2


def test_a_run_says_it_once_for_several_workers_on_equal_cards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(stderr=True, width=300)
    render(tmp_path, rows_of("a", "b"), console=console, preset="fast", devices="cpu,cpu")
    said = [text for text in capsys.readouterr().err.splitlines() if "verified" in text]
    assert len(said) == 1
    assert said[0].startswith(
        "warning: preset fast of builtin was never verified on fake cpu: `vgbatch verify"
    )
