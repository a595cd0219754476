"""Where the run puts what happened while another process keeps it out of the ledger.

One file per process and quarrel, `<ledger>.spool/<uuid>.jsonl`, one JSON line for each entry. The next
successful write replays the file and records its UUID in one transaction, then deletes it: a kill at
any point leaves either a file that was not replayed or one whose UUID says that it was.
In a folder of its own, because the ledger's may hold a million clips and every visit looks for spools.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from manifests.errors import LedgerError
from storage.filesystem import sync_folder
from storage.rows import AttemptRow, BatchRow, CapRow, ClipRow, Outcome, RunUpdate

Entry = Outcome | RunUpdate
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spool:
    """One spool file. id: its UUID, as recorded in `flushes` once replayed."""

    path: Path
    id: str

    @classmethod
    def new(cls, ledger: Path) -> Spool:
        id = str(uuid4())
        return cls(_folder(ledger) / f"{id}.jsonl", id)

    def append(self, entries: Sequence[Entry]) -> None:
        """Adds entries and forces them to the disk."""
        # A line begins as well as ends with a newline: one torn by a full disk spoils only itself.
        lines = "".join(f"\n{_to_json(entry)}\n" for entry in entries)
        try:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
            sync_folder(self.path.parent)
            sync_folder(self.path.parent.parent)
        except OSError as error:
            raise LedgerError(f"neither the ledger nor {self.path} can be written: {error}") from error

    def read(self) -> list[Entry]:
        """The whole entries of the file; a torn line was never reported as written."""
        whole, _, _torn = self.path.read_bytes().rpartition(b"\n")
        try:
            return [_to_entry(values) for line in whole.split(b"\n") if (values := _parse(line)) is not None]
        except (KeyError, TypeError, AttributeError) as error:
            raise LedgerError(
                f"a spool that this vgbatch cannot read: {self.path}",
                hint="run the vgbatch that wrote it once more, or move the file away",
            ) from error


def list_spools(ledger: Path) -> list[Spool]:
    """The spool files of `ledger`, in no order."""
    return [Spool(path, path.stem) for path in _folder(ledger).glob("*.jsonl")]


def remove_spools(ledger: Path, spools: Sequence[Spool]) -> None:
    """Deletes replayed spools; one that cannot be deleted is known by its id and not replayed again."""
    with contextlib.suppress(OSError):
        for spool in spools:
            spool.path.unlink()
        _folder(ledger).rmdir()


def rows_by_table(entries: Sequence[Entry]) -> dict[str, list[Any]]:
    """The ledger rows of all outcomes among `entries`, by table."""
    outcomes = [entry for entry in entries if isinstance(entry, Outcome)]
    return {
        "batches": [outcome.batch for outcome in outcomes],
        "attempts": [row for outcome in outcomes for row in outcome.attempts],
        "clips": [row for outcome in outcomes for row in outcome.clips],
        "caps": [row for outcome in outcomes for row in outcome.caps],
    }


def run_updates(entries: Sequence[Entry]) -> list[RunUpdate]:
    return [entry for entry in entries if isinstance(entry, RunUpdate)]


def _folder(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.name}.spool")


def _to_json(entry: Entry) -> str:
    kind = "outcome" if isinstance(entry, Outcome) else "run_update"
    return json.dumps({kind: asdict(entry)}, default=datetime.isoformat)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _to_entry(entry: dict[str, Any]) -> Entry:
    if "run_update" in entry:
        return _row(RunUpdate, entry["run_update"])
    outcome = entry["outcome"]
    return Outcome(
        batch=_row(BatchRow, outcome["batch"]),
        attempts=tuple(_row(AttemptRow, row) for row in outcome["attempts"]),
        clips=tuple(_row(ClipRow, row) for row in outcome["clips"]),
        caps=tuple(_row(CapRow, row) for row in outcome["caps"]),
    )


def _row(row_type: type[T], values: dict[str, Any]) -> T:
    instants = {field.name for field in fields(row_type) if "datetime" in str(field.type)}  # type: ignore[arg-type]
    return row_type(
        **{
            name: datetime.fromisoformat(value) if name in instants and value is not None else value
            for name, value in values.items()
        }
    )
