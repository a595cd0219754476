"""Verdicts in the ledger: kept as they are, and found again by what they are of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.ledger import Ledger
from storage.rows import VerificationRow
from tests.storage_rows import at, new_ledger, verification_row

ROW = verification_row()


def last(ledger: Ledger, **changes: Any) -> VerificationRow | None:
    wanted = {"model_revision": "rev1", "lora": None, "preset": "fast", "numerics": "n1", "gpu_name": "H200"}
    return ledger.last_verification(**(wanted | changes))


def test_a_verdict_comes_back_as_it_was_recorded(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    assert last(ledger) is None
    ledger.add_verification(ROW)
    assert last(ledger) == ROW


def test_the_last_verdict_counts(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    for seconds, passed in ((10, False), (5, True)):
        ledger.add_verification(replace(ROW, passed=passed, verified_at=at(seconds)))
    found = last(ledger)
    assert found is not None
    assert not found.passed


@pytest.mark.parametrize(
    "other",
    [
        {"model_revision": "rev2"},
        {"lora": "style.safetensors"},
        {"preset": "fp8"},
        {"numerics": "n2"},
        {"gpu_name": "B200"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_verdict_is_of_one_model_lora_preset_version_and_card(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    ledger = new_ledger(tmp_path)
    ledger.add_verification(ROW)
    assert last(ledger, **other) is None
    ledger.add_verification(replace(ROW, **other))
    assert last(ledger, **other) == replace(ROW, **other)


def test_another_model_or_preset_as_reference_says_nothing_of_an_approximation(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    ledger.add_verification(replace(ROW, reference_model="other", reference_revision="rev0"))
    ledger.add_verification(replace(ROW, reference_preset="fp8"))
    assert last(ledger) is None
