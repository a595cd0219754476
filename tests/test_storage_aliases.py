"""Aliases in the ledger: kept as they were written, readable of every ledger, and what verifying said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from manifests.errors import LedgerError
from storage import schema
from storage.ledger import Ledger
from storage.rows import AliasRow
from tests.storage_rows import at, new_ledger, start

PROD = AliasRow(
    alias="prod",
    target="org/wan@0123456789abcdef0123456789abcdef01234567",
    revision="0123456789abcdef0123456789abcdef01234567",
    action="add",
    forced=False,
    recorded_at=at(0),
)


def older_ledger(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Of a program that knew no aliases; a run was planned in it."""
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:2])
        ledger = new_ledger(folder)
        with duckdb.connect(str(ledger.path)) as connection:
            connection.execute("INSERT INTO runs (run_id, state) VALUES ('r1', 'done')")
    return ledger


def test_every_field_of_every_change_survives_in_order(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    rows = [
        PROD,
        replace(PROD, alias="probe-2", target="/models/röt/红", action="add"),
        replace(PROD, target="builtin", revision="b" * 64, action="promote", forced=True, recorded_at=at(60)),
    ]
    for row in rows:
        ledger.add_alias(row)
    assert ledger.alias_changes() == rows


def test_a_clock_that_is_set_back_brings_no_old_revision_back(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    later, earlier = replace(PROD, recorded_at=at(3600)), replace(PROD, action="promote", recorded_at=at(0))
    ledger.add_alias(later)
    ledger.add_alias(earlier)
    assert ledger.alias_changes()[-1] == earlier


def test_a_ledger_that_is_older_than_aliases_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = older_ledger(tmp_path, monkeypatch)
    assert ledger.alias_changes() == []
    assert ledger.verdicts() == {}


def test_an_older_ledger_takes_aliases_once_it_is_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = older_ledger(tmp_path, monkeypatch)
    with pytest.raises(LedgerError, match="has schema 2, this vgbatch needs 3"):
        ledger.add_alias(PROD)
    ledger.create()
    ledger.add_alias(PROD)
    assert ledger.alias_changes() == [PROD]
    last = ledger.last_run()
    assert last is not None
    assert last["run_id"] == "r1"


def test_aliases_are_whole_tables_for_those_who_ask(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a")
    ledger.add_alias(PROD)
    assert ledger.tables("aliases")["aliases"]["alias"].to_pylist() == ["prod"]


def verified(
    ledger: Ledger,
    revision: str,
    passed: bool,
    *,
    against: str = "old",
    verified_at_s: float = 0,
    lora: str | None = None,
) -> None:
    with duckdb.connect(str(ledger.path)) as connection:
        connection.execute(
            "INSERT INTO verifications (model_revision, passed, reference_revision, verified_at, lora) "
            "VALUES (?, ?, ?, ?, ?)",
            [revision, passed, against, at(verified_at_s), lora],
        )


def test_the_last_verdict_on_a_revision_counts(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    verified(ledger, "new", True, verified_at_s=60)
    verified(ledger, "new", False, verified_at_s=0)
    verified(ledger, "worse+few-step", False, against="old+few-step")
    verified(ledger, "old+few-step", False, against="old")
    assert ledger.verdicts() == {"new": True, "worse": False}


def test_presets_and_loras_compared_at_one_revision_say_nothing_of_it(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    verified(ledger, "old", False, against="old")
    verified(ledger, "new", False, lora="style.safetensors")
    assert ledger.verdicts() == {}
