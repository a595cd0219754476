"""`clips.parquet` is replaced whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manifests.errors import LedgerError
from storage.clips import write_clips_parquet
from tests.storage_rows import new_ledger, outcome, start


def test_clips_parquet_reads_back(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path / "ledger")
    start(ledger, "a", "b")
    ledger.record([outcome("a")])
    table = ledger.clips_table("r1")
    path = write_clips_parquet(table, tmp_path)
    assert path == tmp_path / "clips.parquet"
    assert pq.read_table(path).to_pylist() == table.to_pylist()
    smaller = table.slice(0, 1)
    write_clips_parquet(smaller, tmp_path)
    assert pq.read_table(path).num_rows == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["clips.parquet", "ledger"]


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"id": ["a"]})
    path = write_clips_parquet(table, tmp_path)
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("storage.clips.os.fsync", full)
    with pytest.raises(LedgerError, match=r"clips\.parquet could not be written: .*No space left"):
        write_clips_parquet(pa.table({"id": ["b", "c"]}), tmp_path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["clips.parquet"]
