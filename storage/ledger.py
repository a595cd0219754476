"""The ledger: one DuckDB file with every run, job, batch, attempt and clip.

DuckDB lets one process in at a time and keeps even readers out meanwhile, so every method is a short
visit: open, do one thing, close. Only the holder of the run's lock calls the methods that write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from manifests.errors import Busy, LedgerError
from storage import aliases, changes, checks, connection, history, standing, verifications
from storage.filesystem import sync_folder
from storage.overlay import overlay_spools
from storage.rows import AliasRow, CapRow, ClipRow, Outcome, ProbeRow, RunRow, RunUpdate, VerificationRow
from storage.schema import migrate, require_current
from storage.spool import Entry, Spool, list_spools, remove_spools

T = TypeVar("T")

TABLES = (
    "runs",
    "jobs",
    "batches",
    "attempts",
    "clips",
    "caps",
    "probes",
    "aliases",
    "verifications",
    "flushes",
)


class Ledger:
    """path: the DuckDB file. Every method may raise LedgerError, or Busy (who holds it) after 5 s."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spool: Spool | None = None

    def exists(self) -> bool:
        return self.path.exists()

    def create(self) -> None:
        """Makes the ledger and its folder, or brings an older one up to date."""
        if self.exists():
            self._migrate(self.path, is_new=False)
            return
        # Made under another name, so that a kill leaves no half-made ledger.
        unfinished = self.path.with_name(f"{self.path.name}.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A write-ahead log without its database would be replayed into the new one.
            for leftover in (unfinished, _log_of(unfinished), _log_of(self.path)):
                leftover.unlink(missing_ok=True)
            self._migrate(unfinished, is_new=True)
            unfinished.rename(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise LedgerError(f"the ledger {self.path} cannot be made: {error}") from error

    # What a run writes.

    def start_run(
        self,
        run: RunRow,
        *,
        planned: pa.Table,
        reused: pa.Table,
        exhausted: pa.Table,
        left_out: pa.Table,
        rejected: pa.Table,
        adopted: Sequence[ClipRow] = (),
    ) -> None:
        """Records a run and its plan. planned, reused, exhausted, left_out: JOBS_SCHEMA columns and
        `reason`; rejected: REJECTED_SCHEMA. adopted: whole clips found on disk that no row knew.
        """

        def change(ledger: Any) -> None:
            changes.add_run(ledger, run)
            states = {"planned": planned, "reused": reused, "exhausted": exhausted, "left out": left_out}
            for state, jobs in states.items():
                changes.add_jobs(ledger, jobs, run_id=run.run_id, state=state)
            changes.add_rejected(ledger, rejected, run_id=run.run_id)
            changes.add_clips(ledger, adopted)

        self._write(change, patience_s=connection.PATIENCE_S)

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Records outcomes as one: in the ledger, or beside it while another process holds it."""
        self._write_or_spool(outcomes)

    def heartbeat(self, run_id: str, *, at: datetime, device_s: float, gpu_name: str | None = None) -> None:
        """Says that a run lives and how much device time it has used. Spools as `record` does.

        gpu_name: of the workers' devices, once one of them has said it.
        """
        update = RunUpdate(run_id=run_id, heartbeat_at=at, device_s=device_s, gpu_name=gpu_name)
        self._write_or_spool([update])

    def end_run(
        self, run_id: str, *, ended_at: datetime, state: str, exit_code: int, device_s: float
    ) -> None:
        """Ends a run. Spools as `record` does."""
        self._write_or_spool(
            [RunUpdate(run_id=run_id, ended_at=ended_at, state=state, exit_code=exit_code, device_s=device_s)]
        )

    def add_probes(self, probes: Sequence[ProbeRow], *, caps: Sequence[CapRow] = ()) -> None:
        """Records what `vgbatch probe` measured, and what it chose."""
        self._write(lambda ledger: changes.add_probes(ledger, probes, caps), patience_s=connection.PATIENCE_S)

    def add_alias(self, row: AliasRow) -> None:
        """Records that an alias points at a revision from now on."""
        self._write(lambda ledger: aliases.add(ledger, row), patience_s=connection.PATIENCE_S)

    def add_verification(self, row: VerificationRow) -> None:
        """Records what `vgbatch verify` found."""
        self._write(lambda ledger: verifications.add(ledger, row), patience_s=connection.PATIENCE_S)

    def close_dead_runs(self, *, at: datetime) -> list[str]:
        """Marks runs still `running` as killed, ended at their last heartbeat (`at` if that is later).

        The ids of those runs. The caller holds the lock, so none of them lives.
        """
        return self._write(
            lambda ledger: changes.close_dead_runs(ledger, at=at), patience_s=connection.PATIENCE_S
        )

    # What the planner reads.

    def clips(self) -> pa.Table:
        return self._read(history.clips)

    def failures(self) -> pa.Table:
        return self._read(history.failures)

    def failed_jobs(self) -> pa.Table:
        return self._read(history.failed_jobs, or_older=True)

    def previous_settings(self, ids: pa.Array) -> pa.Table:
        return self._read(lambda ledger: history.previous_settings(ledger, ids))

    def caps(self, *, gpu_name: str, numerics: str) -> dict[str, int]:
        return self._read(lambda ledger: history.caps(ledger, gpu_name=gpu_name, numerics=numerics))

    def probed_caps(self, *, gpu_name: str, numerics: str) -> dict[str, int]:
        return self._read(lambda ledger: history.probed_caps(ledger, gpu_name=gpu_name, numerics=numerics))

    def bucket_times(self) -> dict[str, float]:
        return self._read(history.bucket_times)

    def last_gpu_name(self) -> str | None:
        return self._read(history.last_gpu_name)

    def pinned_revision(self, model: str) -> str | None:
        return self._read(lambda ledger: history.pinned_revision(ledger, model), or_older=True)

    def alias_changes(self) -> list[AliasRow]:
        return self._read(aliases.changes, or_older=True)

    # What people, reports and pipelines read.

    def last_verification(
        self, *, model_revision: str, lora: str | None, preset: str, numerics: str, gpu_name: str
    ) -> VerificationRow | None:
        return self._read(
            lambda ledger: verifications.last(
                ledger,
                model_revision=model_revision,
                lora=lora,
                preset=preset,
                numerics=numerics,
                gpu_name=gpu_name,
            )
        )

    def last_run(self, *, of_manifest: bool = False) -> dict[str, Any] | None:
        return self._read(lambda ledger: standing.last_run(ledger, of_manifest=of_manifest), or_older=True)

    def counts(self, run_id: str) -> dict[str, int]:
        return self._read(lambda ledger: standing.counts(ledger, run_id))

    def job(self, id: str) -> dict[str, Any] | None:
        return self._read(lambda ledger: standing.job(ledger, id))

    def rejected_rows(self, run_id: str) -> pa.Table:
        return self._read(lambda ledger: standing.rejected_rows(ledger, run_id))

    def clips_table(self, run_id: str) -> pa.Table:
        return self._read(lambda ledger: standing.clips_table(ledger, run_id))

    def verdicts(self) -> dict[str, bool]:
        return self._read(aliases.verdicts, or_older=True)

    def tables(self, *names: str) -> dict[str, pa.Table]:
        """Whole tables as they stand together at one moment. names: of TABLES."""
        assert set(names) <= set(TABLES), names
        return self._read(
            lambda ledger: {name: ledger.sql(f"FROM {name}").to_arrow_table() for name in names}
        )

    def check(self) -> list[str]:
        return self._read(lambda ledger: checks.check(ledger, ledger=self.path))

    def _migrate(self, path: Path, *, is_new: bool) -> None:
        patience_s = connection.PATIENCE_S
        with connection.visit(path, read_only=False, patience_s=patience_s, may_create=is_new) as ledger:
            migrate(ledger, path=self.path)

    def _read(self, query: Callable[[Any], T], *, or_older: bool = False) -> T:
        """or_older: also of a ledger that `run` has yet to bring up to date, as it asks before it may."""
        self._require_exists()
        with connection.visit(self.path, read_only=True, patience_s=connection.PATIENCE_S) as ledger:
            require_current(ledger, path=self.path, or_older=or_older)
            overlay_spools(ledger, ledger=self.path)
            return query(ledger)

    def _write(self, change: Callable[[Any], T], *, patience_s: float) -> T:
        """Replays the spools and makes `change`, in one transaction."""
        self._require_exists()
        with connection.visit(self.path, read_only=False, patience_s=patience_s) as ledger:
            require_current(ledger, path=self.path)
            ledger.execute("BEGIN")
            spools = list_spools(self.path)
            for spool in changes.pending_spools(ledger, spools):
                changes.replay(ledger, spool)
            result = change(ledger)
            # A replayed file must never grow again, even if the commit is all this process lives to see.
            self._spool = None
            ledger.execute("COMMIT")
            remove_spools(self.path, spools)
        return result

    def _write_or_spool(self, entries: Sequence[Entry]) -> None:
        # Once kept out, a run does not wait again at every entry; it looks in and goes on spooling.
        patience_s = connection.PATIENCE_S if self._spool is None else 0.0
        try:
            self._write(lambda ledger: changes.apply(ledger, entries), patience_s=patience_s)
        except Busy:
            self._spool = self._spool or Spool.new(self.path)
            self._spool.append(entries)

    def _require_exists(self) -> None:
        if not self.exists():
            raise LedgerError(f"no ledger: {self.path}", hint="`vgbatch run` makes one")


def _log_of(database: Path) -> Path:
    return database.with_name(f"{database.name}.wal")
