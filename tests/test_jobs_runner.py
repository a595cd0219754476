from fractions import Fraction

import duckdb
import pyarrow as pa
import pytest

from jobs.prepare import Selection
from jobs.reporting import make_report
from manifests.errors import LedgerError, ManifestError, RunError
from storage import schema
from storage.ledger import Ledger
from storage.probe import probe
from tests.fake_engine import Knobs, read_log
from tests.run_cases import clips_list, leftovers, mp4s, planned, query, render, rows_of, settings_for


def test_every_job_becomes_a_verified_file_and_a_row(tmp_path):
    summary = render(tmp_path, rows_of("a", "b", "c"))
    assert (summary.exit_code, summary.num_delivered, summary.num_frames) == (0, 3, 15)
    assert len(mp4s(tmp_path)) == 3
    assert leftovers(tmp_path) == []
    assert query(tmp_path, "SELECT count(*) FROM clips") == [(3,)]
    for row in clips_list(tmp_path).values():
        info = probe(tmp_path / "out" / row["path"])
        assert (info.width, info.height, info.num_frames, info.fps) == (64, 64, 5, Fraction(8))


def test_an_empty_manifest_is_no_work_and_no_error(tmp_path):
    table = pa.table({"id": pa.nulls(0), "prompt": pa.nulls(0)})
    summary = render(tmp_path, table)
    assert (summary.exit_code, summary.num_planned) == (0, 0)
    assert query(tmp_path, "SELECT count(*) FROM jobs") == [(0,)]


def test_the_same_command_again_renders_nothing(tmp_path):
    render(tmp_path, rows_of("a", "b"))
    log = tmp_path / "log"
    summary = render(tmp_path, rows_of("a", "b"), knobs=Knobs(log=log))
    assert (summary.num_reused, summary.num_planned, summary.exit_code) == (2, 0, 0)
    assert not log.exists()


def test_a_changed_prompt_is_rendered_again_and_says_so(tmp_path):
    rows = rows_of("a", "b")
    render(tmp_path, rows)
    first = clips_list(tmp_path)["a"]["path"]
    rows[0]["prompt"] = "another prompt"
    plan = planned(tmp_path, rows).plan
    assert plan.jobs.select(["id", "reason"]).to_pylist() == [{"id": "a", "reason": "prompt changed"}]
    assert plan.reused["id"].to_pylist() == ["b"]
    render(tmp_path, rows)
    assert (tmp_path / "out" / first).exists()
    assert clips_list(tmp_path)["a"]["path"] != first


def test_a_run_brings_an_older_ledger_up_to_date(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        Ledger(tmp_path / "out" / "vgbatch.duckdb").create()
    with pytest.raises(LedgerError, match="has schema 1"):
        planned(tmp_path, rows_of("a"))
    assert render(tmp_path, rows_of("a")).num_delivered == 1
    assert planned(tmp_path, rows_of("a")).plan.reused.num_rows == 1


def test_a_deleted_file_is_rendered_again(tmp_path):
    render(tmp_path, rows_of("a", "b"))
    mp4s(tmp_path)[0].unlink()
    summary = render(tmp_path, rows_of("a", "b"))
    assert (summary.num_delivered, summary.num_reused) == (1, 1)


def test_only_the_failed_job_is_rendered_by_the_next_run(tmp_path):
    knobs = Knobs(log=tmp_path / "log", non_finite_on=frozenset({"c"}))
    first = render(tmp_path, rows_of("a", "b", "c", "d"), knobs=knobs)
    assert (first.exit_code, first.num_delivered, first.num_failed) == (3, 3, 1)
    second = render(tmp_path, rows_of("a", "b", "c", "d"), knobs=Knobs(log=tmp_path / "log2"))
    assert (second.exit_code, second.num_delivered, second.num_reused) == (0, 1, 3)
    assert [entry["ids"] for entry in read_log(tmp_path / "log2")] == [["c"]]
    states = query(tmp_path, "SELECT run_id, state, count(*) FROM attempts GROUP BY ALL ORDER BY ALL")
    assert [(state, count) for _, state, count in states] == [
        ("delivered", 3),
        ("failed", 1),
        ("delivered", 1),
    ]


def test_a_report_over_two_runs_keeps_the_first_one_s_failure(tmp_path):
    render(tmp_path, rows_of("a", "b"), knobs=Knobs(non_finite_on=frozenset({"b"})))
    render(tmp_path, rows_of("a", "b"))
    tally = make_report(settings_for(tmp_path), by=None, since=None, until=None).total.tally
    assert (tally.num_videos, tally.num_attempts, tally.num_failed) == (2, 3, 1)
    assert tally.time.wasted_ns > 0


def test_non_finite_output_fails_its_job_alone(tmp_path):
    summary = render(tmp_path, rows_of("a", "b", "c", "d"), knobs=Knobs(non_finite_on=frozenset({"b"})))
    assert (summary.num_delivered, summary.num_failed, summary.exit_code) == (3, 1, 3)
    assert clips_list(tmp_path)["b"]["status"] == "failed"
    assert "non-finite output" in clips_list(tmp_path)["b"]["reason"]
    assert "try another seed" in clips_list(tmp_path)["b"]["reason"]
    assert len(mp4s(tmp_path)) == 3


def test_a_wrong_frame_count_never_becomes_a_clip(tmp_path):
    summary = render(tmp_path, rows_of("a", "b"), knobs=Knobs(wrong_count_on=frozenset({"b"})))
    assert (summary.num_delivered, summary.num_failed) == (1, 1)
    assert leftovers(tmp_path) == []


def test_a_raised_error_costs_its_batch_nothing_but_time(tmp_path):
    summary = render(tmp_path, rows_of("a", "b", "c"), knobs=Knobs(raise_on=frozenset({"b"})))
    assert (summary.num_delivered, summary.num_failed) == (2, 1)
    (reason, trace), *_ = query(
        tmp_path, "SELECT reason, traceback FROM attempts WHERE id = 'b' ORDER BY number DESC"
    )
    assert reason == "ValueError: cannot render ['b']"
    assert "fake_engine.py" in trace


def test_a_job_that_kills_its_worker_is_found_and_failed(tmp_path):
    summary = render(tmp_path, rows_of("a", "b", "c", "d"), knobs=Knobs(exit_on=frozenset({"c"})))
    assert (summary.num_delivered, summary.num_failed, summary.exit_code) == (3, 1, 3)
    tries = query(tmp_path, "SELECT state, number FROM attempts WHERE id = 'c' ORDER BY number")
    assert tries == [("lost", 1), ("lost", 2), ("failed", 3)]


def test_a_job_given_up_is_not_tried_again_until_retry(tmp_path):
    knobs = Knobs(exit_on=frozenset({"a"}))
    render(tmp_path, rows_of("a"), knobs=knobs)
    again = render(tmp_path, rows_of("a"), knobs=Knobs(log=tmp_path / "log"))
    assert (again.num_exhausted, again.num_planned, again.exit_code) == (1, 0, 3)
    assert not (tmp_path / "log").exists()


def test_out_of_memory_splits_the_batch_and_lowers_the_cap(tmp_path):
    rows = rows_of(*"abcdefgh")
    knobs = Knobs(log=tmp_path / "log", max_batch=2)
    summary = render(tmp_path, rows, knobs=knobs)
    assert (summary.num_delivered, summary.exit_code) == (8, 0)
    assert query(tmp_path, "SELECT min(cap) FROM caps") == [(2,)]
    # The second half was already at hand when the first half showed that four are too many.
    assert [entry["size"] for entry in read_log(tmp_path / "log")] == [8, 4, 4, 2, 2, 2, 2]
    rows[0]["seed"] = 99
    rows[1]["seed"] = 98
    rows[2]["seed"] = 97
    assert planned(tmp_path, rows).plan.batches["size"].to_pylist() == [2, 2]


def test_a_poisoned_worker_is_replaced(tmp_path):
    rows = rows_of(*"abcdefghijkl")
    knobs = Knobs(poison_on=frozenset({"c"}))
    summary = render(tmp_path, rows, knobs=knobs)
    assert (summary.num_delivered, summary.num_failed) == (11, 1)


def test_two_workers_share_the_work(tmp_path):
    summary = render(tmp_path, rows_of(*"abcdefghijklmnop"), devices="cpu,cpu")
    assert summary.num_delivered == 16
    assert query(tmp_path, "SELECT num_devices FROM runs") == [(2,)]


def test_a_device_that_never_starts_ends_the_run_with_its_reason(tmp_path):
    with pytest.raises(RunError, match="no device left to render on; cpu"):
        render(tmp_path, rows_of("a"), knobs=Knobs(fail_start=True))
    assert query(tmp_path, "SELECT state, exit_code FROM runs") == [("failed", 1)]


def test_rows_that_differ_in_a_batch_setting_never_share_a_batch(tmp_path):
    rows = [
        *rows_of("a", guidance_scale=1.0, steps=4),
        *rows_of("b", guidance_scale=5.0, steps=4),
        *rows_of("c", guidance_scale=5.0, steps=8),
        *rows_of("d", guidance_scale=5.0, steps=4, flow_shift=7.0),
        *rows_of("e", guidance_scale=5.0, steps=4, negative_prompt="blur"),
    ]
    render(tmp_path, rows, knobs=Knobs(log=tmp_path / "log"))
    batches = read_log(tmp_path / "log")
    assert sorted(entry["ids"] for entry in batches) == [["a"], ["b", "e"], ["c"], ["d"]]
    calls = {tuple(entry["ids"]): entry["model_calls"] for entry in batches}
    assert calls[("a",)] * 2 == calls[("b", "e")]
    assert ["", "blur"] in [entry["negative_prompts"] for entry in batches]
    own = query(
        tmp_path, "SELECT id, guidance_scale, steps, flow_shift FROM jobs WHERE id IN ('a', 'c') ORDER BY id"
    )
    assert [row[:3] for row in own] == [("a", 1.0, 4), ("c", 5.0, 8)]


def test_sizes_and_counts_are_delivered_exactly_as_asked(tmp_path):
    wanted = {"w": (250, 130, 5), "x": (64, 64, 15), "y": (64, 64, 16), "z": (64, 64, 1)}
    rows = [
        {"id": id, "prompt": "p", "width": width, "height": height, "num_frames": frames}
        for id, (width, height, frames) in wanted.items()
    ]
    assert render(tmp_path, rows).exit_code == 0
    for id, row in clips_list(tmp_path).items():
        info = probe(tmp_path / "out" / row["path"])
        assert (info.width, info.height, info.num_frames) == wanted[id]


def test_seeds_are_recorded_exactly(tmp_path):
    seeds = [4873214862074861313, None, 9223372036854775807, 2**53 + 1]
    rows = rows_of("a", "b", "c", "d")
    for row, seed in zip(rows, seeds, strict=True):
        row["seed"] = seed
    render(tmp_path, rows)
    recorded = dict(query(tmp_path, "SELECT id, seed FROM clips"))
    assert [recorded["a"], recorded["c"], recorded["d"]] == [seeds[0], seeds[2], seeds[3]]
    assert 0 <= recorded["b"] < 2**63


HOSTILE_IDS = [
    "a/b", "../x", "-rf", "a:b", "p%04d", "a\nb", "CON", ".", "..", "字" * 90, "é", " x ", "\x1b[31m",
]  # fmt: skip


def test_hostile_ids_stay_inside_the_output_folder(tmp_path):
    rows = [{**row, "prompt": "🎈" * 300} for row in rows_of(*HOSTILE_IDS)]
    summary = render(tmp_path, rows)
    assert summary.num_delivered + summary.num_rejected == len(HOSTILE_IDS)
    assert len(mp4s(tmp_path)) == summary.num_delivered
    assert {path.name for path in tmp_path.iterdir()} == {"out", "manifest.parquet"}
    assert all(len(path.name.encode()) <= 150 for path in mp4s(tmp_path))
    assert leftovers(tmp_path) == []


def test_a_prompt_over_the_token_limit_is_warned_about_with_its_count(tmp_path):
    rows = rows_of("a")
    rows[0]["prompt"] = "word " * 600 + "red balloon"
    render(tmp_path, rows)
    ((warning,),) = query(tmp_path, "SELECT warning FROM jobs")
    assert "512" in warning
    with pytest.raises(ManifestError):
        render(tmp_path, rows, strict=True)


def test_wrong_rows_are_rejected_and_the_rest_runs(tmp_path):
    rows = rows_of(*"abcdef")
    rows[3]["width"] = 0
    summary = render(tmp_path, rows)
    assert (summary.num_delivered, summary.num_rejected, summary.exit_code) == (5, 1, 3)
    assert clips_list(tmp_path)["d"]["status"] == "rejected"
    assert len(mp4s(tmp_path)) == 5


def test_higher_priority_is_rendered_first(tmp_path):
    rows = [*rows_of("low", steps=4), *rows_of("high", steps=8, priority=5)]
    render(tmp_path, rows, knobs=Knobs(log=tmp_path / "log"))
    assert [entry["ids"] for entry in read_log(tmp_path / "log")] == [["high"], ["low"]]


def test_limit_and_select_choose_jobs(tmp_path):
    rows = rows_of(*"abcd")
    assert render(tmp_path, rows, selection=Selection(limit=1)).num_delivered == 1
    assert render(tmp_path, rows, selection=Selection(select=("d",))).num_delivered == 1
    assert {id for id, row in clips_list(tmp_path).items() if row["status"] == "delivered"} >= {"d"}


def test_a_whole_file_without_a_row_is_adopted(tmp_path):
    render(tmp_path, rows_of("a", "b"))
    (tmp_path / "out" / "vgbatch.duckdb").unlink()
    summary = render(tmp_path, rows_of("a", "b"), knobs=Knobs(log=tmp_path / "log"))
    assert (summary.num_reused, summary.num_planned) == (2, 0)
    assert query(tmp_path, "SELECT id, adopted FROM clips ORDER BY id") == [("a", True), ("b", True)]
    assert not (tmp_path / "log").exists()


def test_a_truncated_file_without_a_row_is_not_adopted(tmp_path):
    render(tmp_path, rows_of("a"))
    (tmp_path / "out" / "vgbatch.duckdb").unlink()
    (clip,) = mp4s(tmp_path)
    clip.write_bytes(clip.read_bytes()[:-200])
    summary = render(tmp_path, rows_of("a"))
    assert summary.num_delivered == 1
    assert probe(mp4s(tmp_path)[0]).num_frames == 5


def test_a_damaged_clip_is_rendered_again(tmp_path):
    render(tmp_path, rows_of("a", "b"))
    clip = mp4s(tmp_path)[0]
    clip.write_bytes(clip.read_bytes()[:-1])
    assert planned(tmp_path, rows_of("a", "b")).plan.jobs["reason"].to_pylist() == ["file missing or damaged"]
    assert render(tmp_path, rows_of("a", "b")).num_delivered == 1
    assert probe(clip).num_frames == 5


def test_a_full_disk_costs_no_job_a_try(tmp_path):
    rows = rows_of(*"abcdefghijklmnopqrst")
    full = Knobs(no_space_on=frozenset("a"), delay_s=dict.fromkeys("bcdefgh", 0.01))
    for _ in range(4):
        summary = render(tmp_path, rows, knobs=full)
        assert (summary.num_failed, summary.exit_code) == (1, 3)
    assert "no space left" in query(tmp_path, "SELECT reason FROM attempts WHERE id = 'a' LIMIT 1")[0][0]
    summary = render(tmp_path, rows)
    assert (summary.num_exhausted, summary.exit_code) == (0, 0)
    assert len(mp4s(tmp_path)) == 20


def test_a_full_disk_stops_the_run_rather_than_render_for_nothing(tmp_path):
    rows = rows_of(*(f"j{number:02}" for number in range(80)))
    summary = render(tmp_path, rows, knobs=Knobs(no_space_on=frozenset({"j00"})))
    assert (summary.state, summary.exit_code, summary.num_failed) == ("stopped", 3, 1)
    assert "no clip can be written" in summary.stopped_by
    assert summary.num_left > 0


def test_a_disk_that_is_full_for_the_last_job_has_stopped_the_run_too(tmp_path):
    summary = render(tmp_path, rows_of("a"), knobs=Knobs(no_space_on=frozenset("a")))
    assert (summary.state, summary.exit_code, summary.num_left) == ("stopped", 3, 0)
    assert summary.stopped_by == f"no clip can be written to {tmp_path / 'out'}"


def test_rows_of_equal_content_each_have_their_own_tries(tmp_path):
    rows = [{**row, "prompt": "the same", "seed": 7} for row in rows_of("a", "b", "c")]
    render(tmp_path, rows, knobs=Knobs(non_finite_on=frozenset("abc")))
    assert query(tmp_path, "SELECT DISTINCT number FROM attempts") == [(1,)]
    assert render(tmp_path, rows).num_delivered == 3


def test_a_ledger_that_vanishes_stops_the_run_and_loses_no_clip(tmp_path):
    rows = rows_of(*(f"j{number:02}" for number in range(80)))
    summary = render(tmp_path, rows, knobs=Knobs(remove_file=tmp_path / "out" / "vgbatch.duckdb"))
    assert (summary.state, summary.exit_code, summary.listed) == ("stopped", 3, False)
    assert "ledger" in summary.stopped_by
    assert summary.num_left > 0
    again = render(tmp_path, rows)
    assert (again.num_delivered + again.num_reused, again.exit_code) == (80, 0)
    assert again.num_reused == summary.num_delivered


def test_a_folder_that_vanishes_stops_the_run_with_ffmpeg_s_words(tmp_path):
    rows = rows_of(*(f"j{number:02}" for number in range(80)))
    ledger = tmp_path / "ledger.duckdb"
    summary = render(tmp_path, rows, knobs=Knobs(remove_folder=tmp_path / "out"), ledger=ledger)
    assert (summary.state, summary.exit_code) == ("stopped", 3)
    assert summary.num_left > 0
    with duckdb.connect(str(ledger), read_only=True) as connection:
        reasons = connection.execute("SELECT DISTINCT reason FROM attempts WHERE state = 'failed'").fetchall()
    assert all("no longer a folder" in reason and "No such file" in reason for (reason,) in reasons)
    assert render(tmp_path, rows, ledger=ledger).num_delivered == 80
