"""What the ledger answers: to the planner, to people, to the next step of a pipeline."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from manifests.errors import LedgerError
from manifests.table import JOBS_SCHEMA
from storage import connection
from storage.history import SETTING_COLUMNS
from storage.ledger import Ledger
from tests.storage_rows import (
    PLAN_SCHEMA,
    at,
    cap_row,
    clip,
    fingerprint,
    job,
    new_ledger,
    outcome,
    plan,
    probe_row,
    rejected,
    run_row,
    start,
)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return new_ledger(tmp_path)


def test_an_empty_ledger_answers_every_question(ledger: Ledger) -> None:
    assert ledger.last_run() is None
    assert ledger.job("a") is None
    assert ledger.pinned_revision("tiny") is None
    assert ledger.caps(gpu_name="H200", numerics="n1") == {}
    assert ledger.bucket_times() == {}
    assert ledger.check() == []
    assert set(ledger.counts("none").values()) == {0}
    for table in (ledger.clips(), ledger.failures(), ledger.failed_jobs(), ledger.clips_table("none")):
        assert table.num_rows == 0
    assert ledger.previous_settings(pa.array([], pa.string())).num_rows == 0


def test_a_run_is_recorded_with_its_plan(ledger: Ledger) -> None:
    start(
        ledger,
        "a",
        reused=plan(job("b", reason="delivered in r0")),
        exhausted=plan(job("c", reason="failed 3 times: out of memory")),
        rejected=rejected(
            {"file": "m.parquet", "row": 7, "id": None, "column": "width", "value": "0", "reason": "even"},
            {"file": "m.parquet", "row": 9, "id": "x", "column": "prompt", "value": None, "reason": "empty"},
        ),
    )
    jobs = ledger.tables("jobs")["jobs"].select(["run_id", "state", "id", "reason", "price", "seed"])
    assert [tuple(row.values()) for row in jobs.to_pylist()] == [
        ("r1", "planned", "a", None, Decimal("0.250000"), 2**63 - 1),
        ("r1", "reused", "b", "delivered in r0", Decimal("0.250000"), 2**63 - 1),
        ("r1", "exhausted", "c", "failed 3 times: out of memory", Decimal("0.250000"), 2**63 - 1),
        ("r1", "rejected", None, "width: even (0)", None, None),
        ("r1", "rejected", "x", "prompt: empty", None, None),
    ]
    assert ledger.rejected_rows("r1").to_pylist() == [
        {"file": "m.parquet", "row": 7, "id": None, "reason": "width: even (0)", "tags": None},
        {"file": "m.parquet", "row": 9, "id": "x", "reason": "prompt: empty", "tags": None},
    ]


def test_heartbeats_and_the_end_of_a_run_change_its_row_alone(ledger: Ledger) -> None:
    start(ledger)
    start(ledger, run_id="r2", started=1000)
    ledger.heartbeat("r1", at=at(30), device_s=25.0)
    beating = ledger.tables("runs")["runs"].to_pylist()[0]
    assert (beating["state"], beating["heartbeat_at"], beating["device_s"]) == ("running", at(30), 25.0)
    assert beating["ended_at"] is None
    ledger.end_run("r1", ended_at=at(60), state="stopped", exit_code=4, device_s=50.0)
    ended, other = ledger.tables("runs")["runs"].sort_by("run_id").to_pylist()
    assert (ended["state"], ended["exit_code"], ended["ended_at"]) == ("stopped", 4, at(60))
    assert ended["device_s"] == 50.0
    assert (other["state"], other["heartbeat_at"], other["device_s"]) == ("running", at(1000), 0.0)
    last = ledger.last_run()
    assert last is not None
    assert last["run_id"] == "r2"
    assert last["versions"] == run_row().versions


def test_the_card_is_recorded_once_a_worker_has_named_it(ledger: Ledger) -> None:
    start(ledger, "a")
    ledger.heartbeat("r1", at=at(30), device_s=25.0, gpu_name="H200 NVL")
    ledger.heartbeat("r1", at=at(60), device_s=55.0)
    last = ledger.last_run()
    assert last is not None
    assert (last["gpu_name"], last["device_s"]) == ("H200 NVL", 55.0)


def test_a_killed_run_ends_at_its_last_heartbeat(ledger: Ledger) -> None:
    start(ledger, run_id="killed")
    ledger.heartbeat("killed", at=at(90), device_s=80.0)
    start(ledger, run_id="ended", started=100)
    ledger.end_run("ended", ended_at=at(110), state="done", exit_code=0, device_s=9.0)
    start(ledger, run_id="from the future", started=9999)
    assert sorted(ledger.close_dead_runs(at=at(500))) == ["from the future", "killed"]
    assert ledger.close_dead_runs(at=at(600)) == []
    runs = {row["run_id"]: row for row in ledger.tables("runs")["runs"].to_pylist()}
    assert (runs["killed"]["state"], runs["killed"]["ended_at"]) == ("killed", at(90))
    assert runs["killed"]["device_s"] == 80.0
    assert (runs["ended"]["state"], runs["ended"]["ended_at"]) == ("done", at(110))
    assert runs["from the future"]["ended_at"] == at(500)


def test_clips_are_the_latest_of_each_id_and_fingerprint(ledger: Ledger) -> None:
    def found(id: str, print_: str, *, revision: str, numerics: str) -> dict[str, str]:
        names = ["id", "fingerprint", "file", "model_revision", "numerics"]
        return dict(zip(names, [id, print_, f"{id}.mp4", revision, numerics], strict=True))

    start(ledger, "a", "b")
    ledger.record([outcome("a"), outcome("b", fingerprint="old")])
    ledger.record([outcome("b", seconds=20, fingerprint="new")])
    refreshed = clip("a", delivered_at=at(30), model_revision="rev2", numerics="n2")
    ledger.record([replace(outcome("a", seconds=30), clips=(refreshed,))])
    assert ledger.clips().sort_by([("id", "ascending"), ("fingerprint", "ascending")]).to_pylist() == [
        {
            "id": "a",
            "fingerprint": fingerprint("a"),
            "file": "a.mp4",
            "num_bytes": 1000,
            "model_revision": "rev2",
            "numerics": "n2",
        },
        {
            "id": "b",
            "fingerprint": "new",
            "file": "b.mp4",
            "num_bytes": 1000,
            "model_revision": "rev1",
            "numerics": "n1",
        },
        {
            "id": "b",
            "fingerprint": "old",
            "file": "b.mp4",
            "num_bytes": 1000,
            "model_revision": "rev1",
            "numerics": "n1",
        },
    ]


def test_failures_count_from_the_latest_attempt(ledger: Ledger) -> None:
    start(ledger, "good", "bad", "lost", "cured", "retried")
    ledger.record(
        [
            outcome("good"),
            outcome("bad", state="failed", reason="first"),
            outcome("bad", state="failed", reason="second", number=2, seconds=20),
            outcome("lost", state="failed", reason="once had a reason"),
            outcome("lost", state="lost", reason=None, number=2, seconds=20),
            outcome("cured", state="failed", reason="transient"),
            outcome("cured", number=2, seconds=20),
            outcome("retried", state="failed", reason="third", number=3),
            outcome("retried", state="failed", reason="first again", number=1, seconds=20),
        ]
    )
    found = {row["fingerprint"]: (row["number"], row["reason"]) for row in ledger.failures().to_pylist()}
    assert found == {
        fingerprint("bad"): (2, "second"),
        fingerprint("lost"): (2, None),
        fingerprint("retried"): (1, "first again"),
    }


def test_a_clip_adopted_after_a_lost_attempt_is_no_failure(ledger: Ledger) -> None:
    start(ledger, "a")
    lost = outcome("a", state="lost")
    ledger.record([lost])
    assert ledger.failures().num_rows == 1
    adopted = clip("a", batch=None, cap=None, adopted=True, delivered_at=at(20))
    ledger.record([replace(lost, attempts=(), clips=(adopted,))])
    assert ledger.failures().num_rows == 0
    assert ledger.failed_jobs().num_rows == 0


def test_failed_jobs_come_with_their_latest_row(ledger: Ledger) -> None:
    start(ledger, "a", "b", "c")
    ledger.record(
        [
            outcome("a", state="failed", reason="out of memory"),
            outcome("b", state="failed", reason="changed since"),
            outcome("c"),
        ]
    )
    later = plan(job("a", price=Decimal("9")), job("b", fingerprint="other prompt"))
    start(ledger, run_id="r2", started=100, planned=plan(), exhausted=later)
    failed = ledger.failed_jobs()
    assert failed.schema.equals(PLAN_SCHEMA)
    (row,) = failed.to_pylist()
    assert (row["id"], row["reason"], row["price"]) == ("a", "out of memory", Decimal("9.000000"))
    assert row["tags"] == [("customer", "acme")]


def test_previous_settings_are_those_of_the_latest_delivered_clip(ledger: Ledger) -> None:
    start(ledger, "a", "never")
    ledger.record([outcome("a")])
    changed = job("a", prompt="another prompt", fingerprint="fp2")
    start(ledger, run_id="r2", started=100, planned=plan(changed))
    ledger.record([outcome("a", run_id="r2", fingerprint="fp2", seconds=110)])
    third = job("a", prompt="failed prompt", fingerprint="fp3")
    start(ledger, run_id="r3", started=200, planned=plan(third))
    ledger.record([outcome("a", run_id="r3", fingerprint="fp3", seconds=210, state="failed")])
    found = ledger.previous_settings(pa.array(["never", "a", "unknown"]))
    assert found.to_pylist() == [{name: changed[name] for name in SETTING_COLUMNS}]


def test_setting_columns_are_what_a_job_asks_for() -> None:
    left_out = set(JOBS_SCHEMA.names) - set(SETTING_COLUMNS)
    assert left_out == {
        "file",
        "row",
        "render_width",
        "render_height",
        "render_frames",
        "priority",
        "price",
        "warning",
        "tags",
    }


def test_the_lowest_cap_of_this_card_and_these_numerics_counts(ledger: Ledger) -> None:
    start(ledger, "a")
    rows = (
        cap_row("b1", 8),
        cap_row("b1", 4),
        cap_row("b2", 2),
        cap_row("b1", 1, gpu_name="other"),
        cap_row("b1", 1, numerics="n2"),
    )
    ledger.record([outcome("a", state="failed", caps=rows)])
    assert ledger.caps(gpu_name="H200", numerics="n1") == {"b1": 4, "b2": 2}


def test_the_last_probe_counts_and_what_memory_lowered_since(ledger: Ledger) -> None:
    start(ledger, "a")
    lowered = [cap_row("b1", 1, recorded_at=at(5)), cap_row("b1", 4, recorded_at=at(25)), cap_row("b2", 2)]
    ledger.record([outcome("a", state="failed", caps=tuple(lowered))])
    chosen = [
        cap_row("b1", 16, source="probe", recorded_at=at(20)),
        cap_row("b1", 2, source="probe", recorded_at=at(10)),
        cap_row("b3", 8, source="probe", gpu_name="other"),
        cap_row("b4", 8, source="probe", numerics="n2"),
    ]
    ledger.add_probes([], caps=chosen)
    assert ledger.probed_caps(gpu_name="H200", numerics="n1") == {"b1": 16}
    assert ledger.caps(gpu_name="H200", numerics="n1") == {"b1": 4, "b2": 2}


def test_bucket_times_are_medians_of_done_batches(ledger: Ledger) -> None:
    start(ledger, "a")
    times = [1.0, 2.0, 90.0]
    ledger.record([outcome("a", batch=number, device_s=time) for number, time in enumerate(times)])
    ledger.record([outcome("a", batch=9, device_s=1000.0, state="failed")])
    assert ledger.bucket_times() == {"b64": 2.0}


def test_bucket_times_are_those_of_one_slot(ledger: Ledger) -> None:
    start(ledger, "a")
    batch = outcome("a", device_s=24.0)
    ledger.record([replace(batch, batch=replace(batch.batch, size=8))])
    assert ledger.bucket_times() == {"b64": 3.0}


def test_the_last_card_is_that_of_the_latest_batch_or_probe(ledger: Ledger) -> None:
    assert ledger.last_gpu_name() is None
    start(ledger, "a", "b")
    older, newer = outcome("a", seconds=10), outcome("b", seconds=20)
    ledger.record([replace(newer, batch=replace(newer.batch, gpu_name="B200")), older])
    assert ledger.last_gpu_name() == "B200"
    ledger.add_probes([probe_row("b64", gpu_name="H100", recorded_at=at(30))])
    assert ledger.last_gpu_name() == "H100"


def test_an_unpinned_model_keeps_the_revision_first_resolved(ledger: Ledger) -> None:
    start(ledger, run_id="late", started=500, planned=plan(job("a", model="hub/x", model_revision="new")))
    start(ledger, run_id="early", started=100, planned=plan(job("a", model="hub/x", model_revision="old")))
    assert ledger.pinned_revision("hub/x") == "old"
    assert ledger.pinned_revision("hub/y") is None


def mixed_run(ledger: Ledger) -> None:
    """A run with one job of every status; `again` took two tries."""
    start(ledger, "old", run_id="r0")
    ledger.record([outcome("old", run_id="r0", device_s=3.0)])
    start(
        ledger,
        started=100,
        planned=plan(job("made"), job("again"), job("broken"), job("waiting", reason="new")),
        reused=plan(job("old", reason="delivered in r0")),
        exhausted=plan(job("hopeless", reason="failed 3 times")),
        rejected=rejected(
            {"file": "z.parquet", "row": 3, "id": None, "column": "fps", "value": "-1", "reason": "1 to 240"}
        ),
    )
    ledger.record(
        [
            outcome("made", seconds=110),
            outcome("again", seconds=120, state="lost", batch=1),
            outcome("again", seconds=130, number=2, batch=1),
            outcome("broken", seconds=140, state="failed", reason="non-finite output", batch=2),
        ]
    )


def test_counts_add_up(ledger: Ledger) -> None:
    mixed_run(ledger)
    assert ledger.counts("r1") == {
        "planned": 4,
        "delivered": 2,
        "reused": 1,
        "failed": 1,
        "rejected": 1,
        "exhausted": 1,
        "pending": 1,
    }
    assert ledger.counts("r0")["delivered"] == 1, "a later run leaves an earlier one's tallies alone"


def test_jobs_left_out_of_a_run_are_pending(ledger: Ledger) -> None:
    start(ledger, "a", left_out=plan(job("b", reason="beyond --limit 1")))
    assert (ledger.counts("r1")["planned"], ledger.counts("r1")["pending"]) == (2, 2)
    left = ledger.job("b")
    assert left is not None
    assert left["status"] == "pending"


def test_a_retry_counts_for_the_run_it_retries(ledger: Ledger) -> None:
    mixed_run(ledger)
    start(ledger, run_id="r2", started=200, retry_of="r1", planned=plan(job("broken"), job("hopeless")))
    ledger.record(
        [
            outcome("broken", run_id="r2", seconds=210),
            outcome("hopeless", run_id="r2", seconds=220, state="failed", reason="still hopeless"),
        ]
    )
    counts = ledger.counts("r1")
    assert (counts["delivered"], counts["failed"], counts["exhausted"], counts["pending"]) == (3, 1, 0, 1)
    found = {row["id"]: (row["status"], row["reason"]) for row in ledger.clips_table("r1").to_pylist()}
    assert found["broken"] == ("delivered", None)
    assert found["hopeless"] == ("failed", "still hopeless")
    last, read = ledger.last_run(), ledger.last_run(of_manifest=True)
    assert last is not None
    assert read is not None
    assert (last["run_id"], read["run_id"]) == ("r2", "r1")


def test_clips_found_on_disk_are_recorded_with_the_start_of_the_run(ledger: Ledger) -> None:
    adopted = clip("a", batch=None, cap=None, adopted=True)
    start(ledger, planned=plan(), reused=plan(job("a", reason="found on disk")), adopted=[adopted])
    assert ledger.clips()["id"].to_pylist() == ["a"]
    assert ledger.clips_table("r1")["path"].to_pylist() == ["a.mp4"]
    assert ledger.check() == []


def test_clips_table_has_every_job_of_the_manifest(ledger: Ledger) -> None:
    mixed_run(ledger)
    table = ledger.clips_table("r1")
    found = {
        row["id"]: (row["status"], row["path"], row["reason"], row["attempts"], row["seconds"])
        for row in table.to_pylist()
    }
    assert found == {
        "made": ("delivered", "made.mp4", None, 1, 7.5),
        "again": ("delivered", "again.mp4", None, 2, 15.0),
        "broken": ("failed", None, "non-finite output", 1, 7.5),
        "waiting": ("pending", None, None, 0, 0.0),
        "old": ("reused", "old.mp4", "delivered in r0", 1, 3.0),
        "hopeless": ("exhausted", None, "failed 3 times", 0, 0.0),
        None: ("rejected", None, "fps: 1 to 240 (-1)", 0, 0.0),
    }
    made = table.to_pylist()[table["id"].to_pylist().index("made")]
    assert (made["seed"], made["width"], made["height"], made["num_frames"]) == (2**63 - 1, 64, 64, 5)
    assert made["fps"] == pytest.approx(24000 / 1001)
    assert made["duration_s"] == pytest.approx(5 * 1001 / 24000)
    assert made["tags"] == [("customer", "acme")]
    assert table["file"].to_pylist()[-1] == "z.parquet"


def test_a_job_is_told_with_all_its_attempts_and_its_clip(ledger: Ledger) -> None:
    mixed_run(ledger)
    again = ledger.job("again")
    assert again is not None
    assert (again["status"], again["reason"], again["run_id"]) == ("delivered", None, "r1")
    assert [(row["number"], row["state"]) for row in again["attempts"]] == [(1, "lost"), (2, "delivered")]
    assert again["clip"]["file"] == "again.mp4"
    assert again["settings"]["prompt"] == "a clip of again"
    assert again["settings"]["tags"] == {"customer": "acme"}
    broken, old = ledger.job("broken"), ledger.job("old")
    assert broken is not None
    assert old is not None
    assert (broken["status"], broken["reason"], broken["clip"]) == ("failed", "non-finite output", None)
    assert (old["status"], old["run_id"], old["clip"]["run_id"]) == ("reused", "r1", "r0")


@pytest.mark.parametrize("id", ["", "'; DROP TABLE jobs; --", "a\nb\0c", "字" * 90, "%", "$id"])
def test_any_id_is_found_again(id: str, ledger: Ledger) -> None:
    start(ledger, id, "other")
    ledger.record([outcome(id), outcome("other")])
    found = ledger.job(id)
    assert found is not None
    assert found["id"] == found["attempts"][0]["id"] == found["clip"]["id"] == id
    assert id in ledger.clips()["id"].to_pylist()


def test_threads_of_one_process_may_read_and_write_at_once(ledger: Ledger) -> None:
    start(ledger)
    errors: list[BaseException] = []

    def repeat(visit: object) -> None:
        try:
            for number in range(6):
                visit(number)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=repeat, args=(visit,))
        for visit in (
            lambda number: ledger.record([outcome(f"a{number}", batch=number)]),
            lambda number: ledger.clips(),
            lambda number: ledger.last_run(),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert ledger.clips().num_rows == 6


def test_a_ledger_that_vanishes_while_it_is_opened_is_not_made_anew(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = connection._connect

    def too_late(path: Path, **settings: Any) -> Any:
        path.unlink()
        return connect(path, **settings)

    monkeypatch.setattr(connection, "_connect", too_late)
    with pytest.raises(LedgerError, match="is gone"):
        ledger.heartbeat("r1", at=datetime(2026, 1, 1, tzinfo=UTC), device_s=1.0)
    assert not ledger.path.exists()
