import json
import multiprocessing
from pathlib import Path

import pytest

from jobs.lock import run_lock
from manifests.errors import Busy


def hold(folder: Path, ready, release) -> None:
    with run_lock(out=folder, ledger=folder / "l.duckdb", run_id="first"):
        ready.set()
        release.wait(30)


def test_second_holder_is_refused_with_the_name_of_the_first(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, ready, release))
    other.start()
    assert ready.wait(30)
    with (
        pytest.raises(Busy, match=f"process {other.pid} .*run first") as raised,
        run_lock(out=tmp_path, ledger=tmp_path / "l.duckdb", run_id="second"),
    ):
        pass
    assert raised.value.exit_code == 75
    release.set()
    other.join()


def test_a_ledger_shared_by_two_folders_is_held_too(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    with (
        run_lock(out=a, ledger=tmp_path / "l.duckdb", run_id="first"),
        pytest.raises(Busy),
        run_lock(out=b, ledger=tmp_path / "l.duckdb", run_id="second"),
    ):
        pass


def test_a_killed_holder_leaves_nothing_to_clean_up(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, ready, release))
    other.start()
    assert ready.wait(30)
    other.kill()
    other.join()
    with run_lock(out=tmp_path, ledger=tmp_path / "l.duckdb", run_id="third"):
        holder = json.loads((tmp_path / ".vgbatch.lock").read_text())
    assert holder["run"] == "third"
