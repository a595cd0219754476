"""`vgbatch probe` with the fake engine: what is measured, chosen, kept, and what plan and run make of it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jobs.prepare import Selection, plan_reading, read, read_bucket
from jobs.probing import Probe, probe
from manifests.errors import Busy, RunError, UsageError
from tests.fake_engine import Knobs, read_log
from tests.run_cases import (
    Row,
    command,
    leftovers,
    mp4s,
    planned,
    query,
    render,
    rows_of,
    settings_for,
    write_manifest,
)

RISING = {size: 1.0 / size for size in (1, 2, 4, 8, 16, 32)}
ROWS = rows_of(*"abcdefgh")  # one bucket, of which the rule renders 8 at once


def probe_rows(folder: Path, rows: list[Row], *, knobs: Knobs | None = None, **flags: object) -> Probe:
    """One whole probe in this process, its worker spawned."""
    settings = settings_for(folder, **flags)
    reading, models = read(str(write_manifest(folder, rows)), settings=settings)
    return probe(
        lambda: plan_reading(reading, models=models, settings=settings, selection=Selection()).plan.buckets,
        models=models,
        settings=settings,
        console=Console(quiet=True),
        factory=(knobs or Knobs()).step_timer(),
    )


def sizes_of(found: Probe) -> list[int]:
    return [row.size for one in found.buckets for row in one.rows]


def caps_of(folder: Path, rows: list[Row], **flags: object) -> tuple[list[int], tuple[str, ...]]:
    plan = planned(folder, rows, **flags).plan
    return plan.batches["size"].to_pylist(), plan.cap_sources


@pytest.mark.parametrize(
    ("clip_step_s", "max_batch", "tried", "cap"),
    [
        ({1: 1.0, 2: 0.5, 4: 0.4, 8: 0.399}, None, [1, 2, 4, 8], 4),
        (RISING, None, [1, 2, 4, 8, 16, 32], 32),
        (RISING, 5, [1, 2, 4, 8], 4),
    ],
    ids=["knee", "limit", "memory"],
)
def test_sizes_rise_until_nothing_is_gained(
    tmp_path: Path, clip_step_s: dict[int, float], max_batch: int | None, tried: list[int], cap: int
) -> None:
    knobs = Knobs(clip_step_s=clip_step_s, max_batch=max_batch, log=tmp_path / "log")
    found = probe_rows(tmp_path, ROWS, knobs=knobs)
    assert (found.exit_code, found.buckets[0].cap) == (0, cap)
    assert sizes_of(found) == [entry["size"] for entry in read_log(tmp_path / "log")] == tried
    kept = query(tmp_path, "SELECT size, clip_step_s, peak_memory_bytes FROM probes ORDER BY size")
    fits = [size for size in tried if max_batch is None or size <= max_batch]
    assert kept[: len(fits)] == [(size, clip_step_s[size], size * 2**30) for size in fits]
    assert kept[len(fits) :] == [(size, None, 0) for size in tried[len(fits) :]]
    assert query(tmp_path, "SELECT cap, source FROM caps") == [(cap, "probe")]


def test_plan_and_run_use_what_was_measured_above_and_below_the_rule(tmp_path: Path) -> None:
    rows = rows_of(*"abcdefghijklmnop")
    assert caps_of(tmp_path, rows) == ([8, 8], ("rule",))
    probe_rows(tmp_path, rows, knobs=Knobs(clip_step_s=RISING))
    assert caps_of(tmp_path, rows) == ([16], ("probe",))
    probe_rows(tmp_path, rows, knobs=Knobs(clip_step_s={1: 1.0, 2: 0.5, 4: 0.5}))
    assert caps_of(tmp_path, rows[:8]) == ([2] * 4, ("probe",))
    summary = render(tmp_path, rows[:8], knobs=Knobs(log=tmp_path / "log"))
    assert summary.num_delivered == 8
    assert [entry["size"] for entry in read_log(tmp_path / "log")] == [2] * 4
    assert query(tmp_path, "SELECT DISTINCT cap FROM clips") == [(2,)]


def test_memory_that_runs_out_later_lowers_a_probed_cap_until_the_next_probe(tmp_path: Path) -> None:
    rows = rows_of(*"abcdefghijklmnop")
    probe_rows(tmp_path, rows, knobs=Knobs(clip_step_s=RISING))
    render(tmp_path, rows[:8], knobs=Knobs(max_batch=4))
    fresh = rows_of(*"qrstuvwx")
    assert caps_of(tmp_path, fresh) == ([4, 4], ("out of memory",))
    probe_rows(tmp_path, fresh, knobs=Knobs(clip_step_s=RISING))
    assert caps_of(tmp_path, fresh) == ([8], ("probe",))


def test_only_the_bucket_and_the_card_that_were_probed_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.devices.list_devices", lambda: ("cuda:0",))
    wide = rows_of("w", width=128)
    probe_rows(tmp_path, ROWS, knobs=Knobs(clip_step_s={1: 1.0, 2: 1.0}), devices="cuda:0")
    assert query(tmp_path, "SELECT DISTINCT gpu_name FROM probes") == [("fake cuda:0",)]
    assert caps_of(tmp_path, [*ROWS, *wide]) == ([1] * 9, ("probe", "rule"))
    render(tmp_path, wide)  # on another card, which is this machine's from then on
    assert caps_of(tmp_path, ROWS) == ([8], ("rule",))


def test_delivered_jobs_need_no_probe(tmp_path: Path) -> None:
    render(tmp_path, ROWS)
    found = probe_rows(tmp_path, ROWS, knobs=Knobs(log=tmp_path / "log"))
    assert (found.buckets, found.gpu_name, found.exit_code) == ((), None, 0)
    assert not (tmp_path / "log").exists()


def test_a_clip_that_does_not_fit_alone_is_named_and_the_other_buckets_go_on(tmp_path: Path) -> None:
    rows = [*ROWS, *rows_of("w", width=128)]
    found = probe_rows(tmp_path, rows, knobs=Knobs(max_batch=0))
    assert [one.cap for one in found.buckets] == [None, None]
    assert "memory runs out with a single clip" in str(found.buckets[0].reason)
    assert found.exit_code == 3
    assert query(tmp_path, "SELECT * FROM caps") == []
    assert caps_of(tmp_path, ROWS) == ([8], ("rule",))


def test_a_worker_that_dies_costs_one_bucket_and_leaves_no_cap_behind(tmp_path: Path) -> None:
    rows = [*ROWS, *rows_of("w", width=128)]
    found = probe_rows(tmp_path, rows, knobs=Knobs(exit_at_size=2))
    assert [one.cap for one in found.buckets] == [None, None]
    assert "2 at once: the worker process died (exit code 1)" in str(found.buckets[1].reason)
    assert (found.exit_code, found.num_left) == (3, 0)
    assert query(tmp_path, "SELECT count(*) FROM caps") == [(0,)]


def test_an_engine_that_raises_is_replaced_for_the_next_bucket(tmp_path: Path) -> None:
    rows = [*ROWS, *rows_of("w", width=128)]
    found = probe_rows(tmp_path, rows, knobs=Knobs(clip_step_s={1: 1.0}))
    assert [one.reason for one in found.buckets] == ["2 at once: KeyError: 2"] * 2
    assert query(tmp_path, "SELECT size FROM probes") == [(1,), (1,)]


def test_a_device_that_never_starts_ends_the_probe_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no device left to render on; cpu"):
        probe_rows(tmp_path, ROWS, knobs=Knobs(fail_start=True))


def test_a_probe_renders_no_clip_and_leaves_no_file(tmp_path: Path) -> None:
    probe_rows(tmp_path, ROWS)
    assert mp4s(tmp_path) == []
    assert leftovers(tmp_path) == []
    assert query(tmp_path, "SELECT count(*) FROM runs") == [(0,)]


def test_one_bucket_by_options_is_the_one_that_such_a_row_is_in(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, strict=True)
    wanted: dict[str, Any] = {"num_frames": 5, "steps": 7, "guidance_scale": 2.5}
    bucket, _ = read_bucket(settings=settings, size="60x62", **wanted)
    rows = rows_of("a", width=60, height=62, steps=7, guidance_scale=2.5)
    assert planned(tmp_path, rows).plan.buckets == (bucket,)
    default, _ = read_bucket(settings=settings, size=None, num_frames=None, steps=None, guidance_scale=None)
    assert planned(tmp_path, [{"prompt": "p"}]).plan.buckets == (default,)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"size": "huge"}, "--size: huge: must be a size like `1344x768`"),
        ({"size": "61x64"}, "--size: 61x64: .*even"),
        ({"num_frames": 0}, "--frames: 0: "),
        ({"steps": 0}, "--steps: 0: "),
        ({"guidance_scale": -1.0}, "--guidance-scale: -1.0: "),
    ],
)
def test_an_option_that_no_row_could_have_is_refused(
    tmp_path: Path, wanted: dict[str, Any], message: str
) -> None:
    nothing = {"size": None, "num_frames": None, "steps": None, "guidance_scale": None}
    with pytest.raises(UsageError, match=message):
        read_bucket(settings=settings_for(tmp_path), **{**nothing, **wanted})


def vgbatch(*args: str, folder: Path, knobs: str = "Knobs()") -> tuple[int, str, str]:
    process = command(*args, folder=folder, knobs=knobs)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_the_command_prints_a_table_and_plan_says_where_caps_come_from(tmp_path: Path) -> None:
    write_manifest(tmp_path, [*ROWS, *rows_of("odd", width=65)])
    code, out, err = vgbatch("probe", "manifest.parquet", folder=tmp_path)
    assert code == 3, err
    assert "rejected: manifest.parquet row 8" in err
    assert "64x64x5 20 steps: 2 at once: 0.5 s a clip and step, 2.0 GiB" in err
    assert [entry.split() for entry in out.splitlines()] == [
        ["model", "bucket", "size", "s/clip/step", "times", "as", "fast", "peak", "GiB"],
        ["builtin", "64x64x5", "20", "steps", "1", "1", "1.00", "1.0"],
        ["2", "0.5", "2.00", "2.0"],
        ["4", "0.4", "2.50", "4.0", "cap"],
        ["8", "0.4", "2.50", "8.0"],
        ["1", "cap", "measured", "on", "fake", "cpu,", "for", "`run`", "to", "use"],
    ]
    code, out, err = vgbatch("plan", "manifest.parquet", folder=tmp_path)
    assert "4/4 (probe)" in out
    code, out, err = vgbatch("plan", "manifest.parquet", "--json", folder=tmp_path)
    (bucket,) = json.loads(out)["buckets"]
    assert (bucket["cap"], bucket["cap_source"], bucket["batches"]) == (4, "probe", 2)


def test_json_holds_every_size_of_one_bucket_given_by_options(tmp_path: Path) -> None:
    options = ["--size", "64x64", "--frames", "5"]
    code, out, err = vgbatch("probe", *options, "--json", folder=tmp_path, knobs="Knobs(max_batch=2)")
    assert code == 0, err
    facts = json.loads(out)
    (bucket,) = facts["buckets"]
    assert (facts["gpu_name"], bucket["cap"], bucket["reason"]) == ("fake cpu", 2, None)
    assert [(row["size"], row["clip_step_s"], row["times_as_fast"]) for row in bucket["sizes"]] == [
        (1, 1.0, 1.0),
        (2, 0.5, 2.0),
        (4, None, None),
    ]
    write_manifest(tmp_path, ROWS)
    code, out, err = vgbatch("plan", "manifest.parquet", folder=tmp_path)
    assert "2/2 (probe)" in out


def test_options_of_the_other_kind_are_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, ROWS)
    code, _, err = vgbatch("probe", "manifest.parquet", "--frames", "5", folder=tmp_path)
    assert (code, err.splitlines()[0]) == (2, "error: --frames with a manifest: 5")
    code, _, err = vgbatch("probe", "--limit", "5", folder=tmp_path)
    assert (code, err.splitlines()[0]) == (2, "error: --limit without a manifest: 5")


def test_ctrl_c_keeps_what_was_measured_and_holds_the_lock_until_then(tmp_path: Path) -> None:
    write_manifest(tmp_path, [*ROWS, *rows_of("w", width=128)])
    process = command("probe", "manifest.parquet", folder=tmp_path, knobs="Knobs(hang_at_size=4)")
    assert process.stderr is not None
    assert any("2 at once" in said for said in process.stderr)
    with pytest.raises(Busy, match="another run is at work here"):
        render(tmp_path, ROWS)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped by SIGINT: 2 buckets without a cap" in out
    assert query(tmp_path, "SELECT size, clip_step_s FROM probes ORDER BY size") == [(1, 1.0), (2, 0.5)]
    assert query(tmp_path, "SELECT count(*) FROM caps") == [(0,)]
    assert caps_of(tmp_path, ROWS) == ([8], ("rule",))
