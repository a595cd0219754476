"""Kills, signals and locks, with real processes that meet through files and pipes, never by sleeping."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from storage.probe import probe
from tests.run_cases import clips_list, command, leftovers, mp4s, query, rows_of, write_manifest


def wait_for(condition, what: str, *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        os.sched_yield()


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def num_begun(folder: Path) -> int:
    """Batches that engines were given; what they were to encode before is in the log too."""
    log = folder / "log"
    return log.read_text().count('"ids":') if log.exists() else 0


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_killed_run_leaves_no_child_and_resumes(tmp_path):
    write_manifest(tmp_path, rows_of("a", "b", "c"))
    # One batch of three: `a` and `b` could be written only after the hanging one.
    knobs = "Knobs(log=Path('log'), hang_on=frozenset({'c'}))"
    first = command("run", "manifest.parquet", folder=tmp_path, knobs=knobs)
    wait_for(lambda: num_begun(tmp_path) == 1, "the first batch")
    workers = children_of(first.pid)
    first.kill()
    first.communicate()
    wait_for(lambda: all(gone(pid) for pid in workers), "the workers of a killed parent end")
    code, _, err = finish(command("run", "manifest.parquet", folder=tmp_path))
    assert code == 0, err
    assert len(mp4s(tmp_path)) == 3
    assert leftovers(tmp_path) == []
    states = query(tmp_path, "SELECT state FROM runs ORDER BY started_at")
    assert states == [("killed",), ("done",)]


def test_a_playable_partial_is_never_taken_for_a_clip(tmp_path):
    write_manifest(tmp_path, rows_of("a", num_frames=17))
    assert finish(command("run", "manifest.parquet", folder=tmp_path))[0] == 0
    (clip,) = mp4s(tmp_path)
    # What a kill in mid-write leaves: a partial of another run, and no final name.
    partial = clip.with_name(f".{clip.name}.deadrun.partial")
    clip.rename(partial)
    (tmp_path / "out" / "vgbatch.duckdb").unlink()
    code, _, err = finish(command("run", "manifest.parquet", folder=tmp_path))
    assert code == 0, err
    assert probe(mp4s(tmp_path)[0]).num_frames == 17


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_batch_on_the_device_and_stops(tmp_path, signum, code):
    write_manifest(tmp_path, rows_of(*"abcdefghijklmnopqrst"))
    knobs = "Knobs(log=Path('log'), delay_s={id: 0.05 for id in 'abcdefghijklmnopqrst'})"
    process = command("run", "manifest.parquet", folder=tmp_path, knobs=knobs)
    wait_for(lambda: num_begun(tmp_path) >= 1, "the first batch")
    process.send_signal(signum)
    got, out, err = finish(process)
    assert got == code, err
    assert "stopping" in err
    assert 0 < len(mp4s(tmp_path)) < 20
    assert leftovers(tmp_path) == []
    assert "the same command goes on" in out
    statuses = {row["status"] for row in clips_list(tmp_path).values()}
    assert statuses == {"delivered", "pending"}
    code, _, err = finish(command("run", "manifest.parquet", folder=tmp_path))
    assert code == 0, err
    assert len(mp4s(tmp_path)) == 20


def test_a_second_signal_stops_at_once(tmp_path):
    write_manifest(tmp_path, rows_of("a"))
    knobs = "Knobs(log=Path('log'), hang_on=frozenset({'a'}))"
    process = command("run", "manifest.parquet", folder=tmp_path, knobs=knobs)
    wait_for(lambda: num_begun(tmp_path) == 1, "the first batch")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    for said in process.stderr:
        if "stopping" in said:
            break
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert mp4s(tmp_path) == []


def test_the_second_of_two_runs_exits_75_naming_the_first(tmp_path):
    write_manifest(tmp_path, rows_of("a"))
    knobs = "Knobs(log=Path('log'), hang_on=frozenset({'a'}))"
    first = command("run", "manifest.parquet", folder=tmp_path, knobs=knobs)
    wait_for(lambda: num_begun(tmp_path) == 1, "the first run at work")
    code, _, err = finish(command("run", "manifest.parquet", folder=tmp_path))
    assert code == 75
    assert f"process {first.pid}" in err
    first.kill()
    first.communicate()
    assert finish(command("run", "manifest.parquet", folder=tmp_path))[0] == 0


def test_a_killed_worker_s_batch_goes_to_another(tmp_path):
    write_manifest(tmp_path, rows_of(*"abcdefghijkl", num_frames=5))
    (tmp_path / "fault").touch()
    knobs = "Knobs(log=Path('log'), hang_on=frozenset({'a'}), while_exists=Path('fault'))"
    process = command("run", "manifest.parquet", "--devices", "cpu,cpu", folder=tmp_path, knobs=knobs)
    wait_for(lambda: num_begun(tmp_path) >= 1, "batches at work")
    hung = [
        pid for pid in children_of(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    (tmp_path / "fault").unlink()
    for pid in hung:
        os.kill(pid, signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    assert len(mp4s(tmp_path)) == 12
    assert query(tmp_path, "SELECT count(*) > 0 FROM batches WHERE state = 'lost' AND device_s > 0") == [
        (True,)
    ]


def test_a_ledger_held_by_a_viewer_loses_nothing(tmp_path):
    write_manifest(tmp_path, rows_of("a", "b"))
    assert finish(command("run", "manifest.parquet", folder=tmp_path))[0] == 0
    holder = subprocess.Popen(
        [os.sys.executable, "-c",
         "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print('held', flush=True); sys.stdin.read()",
         str(tmp_path / "out" / "vgbatch.duckdb")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    code, _, err = finish(command("report", folder=tmp_path))
    assert code == 75
    assert str(holder.pid) in err
    holder.communicate("")
    assert finish(command("report", folder=tmp_path))[0] == 0


def test_json_of_a_stopped_run_says_what_is_left(tmp_path):
    write_manifest(tmp_path, rows_of(*"abcdefghijklmnopqrst"))
    knobs = "Knobs(log=Path('log'), delay_s={id: 0.05 for id in 'abcdefghijklmnopqrst'})"
    process = command("run", "manifest.parquet", "--json", folder=tmp_path, knobs=knobs)
    wait_for(lambda: num_begun(tmp_path) >= 1, "the first batch")
    process.send_signal(signal.SIGTERM)
    _, out, _ = finish(process)
    facts = json.loads(out)
    assert facts["stopped_by"] == "SIGTERM"
    assert facts["num_left"] + facts["num_delivered"] == 20
