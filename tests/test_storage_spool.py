"""What a run records is never lost and never there twice, whoever holds the ledger and whatever dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from manifests.errors import Busy, LedgerError
from storage import connection
from storage.ledger import Ledger
from storage.rows import RunUpdate
from storage.spool import Spool, list_spools
from tests.storage_rows import at, cap_row, clip, new_ledger, outcome, start

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 0.0)


def python(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def next_line(stream: IO[str] | None) -> str:
    assert stream is not None
    line = stream.readline()
    assert line, "the child ended early"
    return line.strip()


@contextmanager
def held(ledger: Ledger) -> Iterator[subprocess.Popen[str]]:
    """Another process, a notebook say, has the ledger open."""
    script = (
        "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    )
    with python(script, str(ledger.path)) as holder:
        try:
            assert next_line(holder.stdout) == "held"
            yield holder
        finally:
            holder.kill()


def recorded(ledger: Ledger) -> list[str]:
    """The ids of all recorded clips; each must have its batch and attempt, and nothing be amiss."""
    tables = ledger.tables("batches", "attempts", "clips")
    ids: list[str] = sorted(tables["clips"]["id"].to_pylist())
    assert sorted(tables["attempts"]["id"].to_pylist()) == ids
    assert tables["batches"].num_rows == len(ids)
    return ids


def test_outcomes_wait_in_a_spool_while_another_process_holds_the_ledger(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a", "b", "c")
    with held(ledger):
        ledger.record([outcome("a", caps=(cap_row("b64", 2),))])
        ledger.record([outcome("b", batch=1)])
        (spool,) = list_spools(ledger.path)
        assert [entry.attempts[0].id for entry in spool.read()] == ["a", "b"]
    ledger.record([outcome("c", batch=2)])
    assert recorded(ledger) == ["a", "b", "c"]
    assert ledger.tables("flushes")["flushes"].select(["flush_id", "num_outcomes"]).to_pylist() == [
        {"flush_id": spool.id, "num_outcomes": 2}
    ]
    assert ledger.caps(gpu_name="H200", numerics="n1") == {"b64": 2}
    assert ledger.check() == []
    assert [path.name for path in tmp_path.iterdir()] == ["vgbatch.duckdb"]


def test_readers_and_a_starting_run_are_told_who_holds_the_ledger(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger)
    with held(ledger) as holder:
        for visit in (
            ledger.clips,
            ledger.last_run,
            ledger.create,
            lambda: ledger.close_dead_runs(at=at(1)),
            lambda: start(ledger, run_id="r2"),
        ):
            with pytest.raises(Busy, match=rf"vgbatch\.duckdb is held by .*PID {holder.pid}\b") as caught:
                visit()
            assert caught.value.exit_code == 75


def test_a_ledger_that_is_left_in_time_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a")
    with held(ledger) as holder:

        def leave(_seconds: float) -> None:
            holder.kill()
            holder.wait()

        monkeypatch.setattr(connection, "PATIENCE_S", 60.0)
        monkeypatch.setattr(connection.time, "sleep", leave)
        ledger.record([outcome("a")])
        assert list_spools(ledger.path) == []
    assert recorded(ledger) == ["a"]


def test_a_run_that_was_kept_out_once_does_not_wait_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a", "b")
    waits: list[float] = []
    with held(ledger):
        ledger.record([outcome("a")])
        monkeypatch.setattr(connection, "PATIENCE_S", 60.0)
        monkeypatch.setattr(connection.time, "sleep", waits.append)
        ledger.record([outcome("b", batch=1)])
    assert waits == []
    assert recorded(ledger) == ["a", "b"]


def test_readers_see_what_is_still_spooled(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a", "b", "c")
    ledger.record([outcome("a")])
    with held(ledger):
        ledger.record([outcome("b", batch=1), outcome("c", batch=2, state="failed", reason="non-finite")])
        ledger.heartbeat("r1", at=at(30), device_s=20.0)
        ledger.end_run("r1", ended_at=at(40), state="done", exit_code=3, device_s=33.5)
    reader = Ledger(ledger.path)
    assert reader.counts("r1") == {
        "planned": 3,
        "delivered": 2,
        "reused": 0,
        "failed": 1,
        "rejected": 0,
        "exhausted": 0,
        "pending": 0,
    }
    run = reader.last_run()
    assert run is not None
    assert (run["state"], run["exit_code"], run["device_s"]) == ("done", 3, 33.5)
    assert (run["heartbeat_at"], run["ended_at"]) == (at(30), at(40))
    assert reader.failures().to_pylist() == [
        {"id": "c", "fingerprint": "fingerprint of c", "number": 1, "reason": "non-finite"}
    ]
    assert reader.tables("clips")["clips"]["id"].to_pylist() == ["a", "b"]
    (problem,) = reader.check()
    assert problem.startswith("outcomes still in a spool")
    assert len(list_spools(ledger.path)) == 1, "a reader must not touch the spool"
    assert reader.close_dead_runs(at=at(99)) == [], "the run had ended, only its row had not said so"
    assert reader.last_run() == run


def test_a_torn_line_is_ignored_and_spoils_no_other(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a", "b")
    spool = Spool.new(ledger.path)
    spool.append([outcome("a")])
    with spool.path.open("ab") as file:
        file.write(b'\n{"outcome": {"batch": {"run_id": "torn when the disk was full')
    spool.append([outcome("b", batch=1)])
    with spool.path.open("ab") as file:
        file.write(b'\n{"outcome": {"batch": {"run_id": "torn by a kill')
    assert [entry.attempts[0].id for entry in spool.read()] == ["a", "b"]
    assert ledger.close_dead_runs(at=at(1)) == ["r1"]
    assert recorded(ledger) == ["a", "b"]


@pytest.mark.parametrize(
    "line", [b'{"outcome": {"batch": {"no such column": 1}}}', b"7", b'{"new kind": {}}']
)
def test_a_spool_of_another_version_is_named_and_kept(line: bytes, tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a")
    spool = Spool.new(ledger.path)
    spool.append([outcome("a")])
    with spool.path.open("ab") as file:
        file.write(line + b"\n")
    before = spool.path.read_bytes()
    for visit in (lambda: ledger.close_dead_runs(at=at(1)), ledger.clips):
        with pytest.raises(LedgerError, match=f"cannot read: .*{spool.id}"):
            visit()
    assert spool.path.read_bytes() == before


def test_every_entry_survives_the_spool(tmp_path: Path) -> None:
    entries = [
        outcome("字\n\0\"'", state="lost", reason="worker died\nat night", caps=(cap_row("b64", 1),)),
        outcome("a", device_s=1 / 3),
        RunUpdate(run_id="r1", device_s=0.1, heartbeat_at=at(0.123456)),
    ]
    spool = Spool.new(tmp_path / "vgbatch.duckdb")
    spool.append(entries)
    assert spool.read() == entries


def test_text_that_is_not_unicode_costs_no_row(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a")
    ledger.record([outcome("a", state="failed", reason="no such file: \udcff.png")])
    assert ledger.failures()["reason"].to_pylist() == ["no such file: ?.png"]


def test_an_outcome_that_can_be_written_nowhere_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a")
    (tmp_path / "vgbatch.duckdb.spool").write_text("a file where the folder should be")
    with held(ledger), pytest.raises(LedgerError, match="neither the ledger nor"):
        ledger.record([outcome("a")])


def test_a_ledger_deleted_during_a_run_is_not_quietly_made_anew(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a")
    ledger.path.unlink()
    with pytest.raises(LedgerError, match="no ledger"):
        ledger.record([outcome("a")])
    assert not ledger.path.exists()


# Each dies, as by a kill, at one step of a write that replays the spool.
DEATHS = {
    "before the replay": ("storage.changes", "pending_spools"),
    "in the middle of the replay": ("storage.changes", "update_runs"),
    "before the commit": ("storage.changes", "close_dead_runs"),
    "after the commit": ("storage.ledger", "remove_spools"),
}


@pytest.mark.parametrize("moment", DEATHS)
def test_a_kill_at_any_step_of_a_replay_neither_loses_nor_doubles(moment: str, tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a", "b")
    spool = Spool.new(ledger.path)
    spool.append([outcome("a"), RunUpdate(run_id="r1", device_s=5.0, heartbeat_at=at(5))])
    script = f"""
import os, sys
from pathlib import Path
from storage.ledger import Ledger
from tests.storage_rows import at
import {DEATHS[moment][0]} as module
module.{DEATHS[moment][1]} = lambda *args, **kwargs: os._exit(9)
Ledger(Path(sys.argv[1])).close_dead_runs(at=at(60))
"""
    with python(script, str(ledger.path)) as child:
        assert child.wait() == 9
    assert spool.path.exists()
    assert recorded(ledger) == ["a"], "a reader overlays what is not in yet, and only that"
    ledger.record([outcome("b", batch=1)])
    assert recorded(ledger) == ["a", "b"]
    assert ledger.tables("flushes")["flushes"].num_rows == 1
    assert list_spools(ledger.path) == []
    assert ledger.check() == []


def test_a_spool_that_cannot_be_deleted_is_not_replayed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a", "b", "c")
    with held(ledger):
        ledger.record([outcome("a")])
    with monkeypatch.context() as patch:
        # The files stay as if the process could not delete them.
        patch.setattr("storage.ledger.remove_spools", lambda ledger, spools: None)
        ledger.record([outcome("b", batch=1)])
    with held(ledger):
        ledger.record([outcome("c", batch=2)])
    assert recorded(ledger) == ["a", "b", "c"]
    ledger.heartbeat("r1", at=at(1), device_s=1.0)
    assert recorded(ledger) == ["a", "b", "c"]
    assert list_spools(ledger.path) == []


# Imports once (pandas too, which DuckDB would import at its first table), then forks a writer for each line
# it reads: starting Python twenty times takes longer.
NURSERY = """
import itertools, os, sys
import pandas
from pathlib import Path
from storage.ledger import Ledger
from tests.storage_rows import outcome
ledger = Ledger(Path(sys.argv[1]))
for line in sys.stdin:
    night = int(line)
    child = os.fork()
    if child == 0:
        for number in itertools.count():
            name = f"{night}-{number}"
            ledger.record([outcome(name, batch=1000 * night + number)])
            os.write(1, f"{name}\\n".encode())
    os.write(1, f"pid {child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


def test_kill_minus_9_twenty_times_loses_nothing_that_was_recorded(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger)
    committed: set[str] = set()
    with python(NURSERY, str(ledger.path)) as nursery:
        assert nursery.stdin is not None
        for night in range(20):
            nursery.stdin.write(f"{night}\n")
            nursery.stdin.flush()
            child = None
            wanted = 1 + night % 2
            while child is None or wanted > 0:
                line = next_line(nursery.stdout)
                if line.startswith("pid "):
                    child = int(line.removeprefix("pid "))
                else:
                    committed.add(line)
                    wanted -= 1
            os.kill(child, signal.SIGKILL)
            while (line := next_line(nursery.stdout)) != "dead":
                committed.add(line)
            assert committed <= set(recorded(ledger)), f"after kill {night}"
        nursery.stdin.close()
    ids = recorded(ledger)
    assert len(ids) == len(set(ids))
    assert len(ids) <= len(committed) + 20, "at most the one that was being written at each kill"


def test_check_names_every_kind_of_problem(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    start(ledger, "a")
    once = outcome("a")
    ledger.record([once, once])
    ledger.record([outcome("a", batch=7, number=2, state="failed")])
    with connection.visit(ledger.path, read_only=False, patience_s=0) as opened:
        opened.execute("INSERT INTO flushes VALUES ('f', now(), 1), ('f', now(), 1)")
    Spool.new(ledger.path).append([outcome("b", batch=9)])
    problems = ledger.check()
    assert [problem.split(":")[0] for problem in problems] == [
        "clip recorded 2 times in run r1",
        "attempt recorded 2 times in run r1",
        "clip without a job in run r1",
        "spool replayed 2 times",
        "outcomes still in a spool, the next run will take them in",
    ]
    assert clip("a").id in problems[0]
