from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manifests.errors import UsageError
from manifests.job import Bucket, Weights
from manifests.packing import BATCHES_SCHEMA
from manifests.planner import Plan
from manifests.table import BUCKET_COLUMNS, JOBS_SCHEMA, bucket_from_row
from tests.manifest_cases import SPEC, by_row, history_of, model_spec, plan_of, read_columns, read_file

WITH_REASON = [*JOBS_SCHEMA.names, "reason"]


def batch_ids(made: Plan) -> list[list[str]]:
    return [[job.id for job in made.batch(number).jobs] for number in range(made.batches.num_rows)]


def all_ids(made: Plan) -> list[str]:
    return [id for ids in batch_ids(made) for id in ids]


# ---- packing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jobs", "sizes", "counts"),
    [
        (1, [1], [1]),
        (2, [2], [2]),
        (3, [4], [3]),
        (4, [4], [4]),
        (5, [4, 4], [4, 1]),
        (8, [4, 4], [4, 4]),
        (11, [4, 4, 4], [4, 4, 3]),
    ],
)
def test_batches_are_cut_at_the_cap_and_padded(
    tmp_path: Path, jobs: int, sizes: list[int], counts: list[int]
) -> None:
    made = plan_of(read_columns(tmp_path, {"id": [f"j{n}" for n in range(jobs)]}))
    assert made.batches.schema.equals(BATCHES_SCHEMA)
    assert made.batches["size"].to_pylist() == sizes
    assert [len(ids) for ids in batch_ids(made)] == counts
    assert all_ids(made) == [f"j{n}" for n in range(jobs)]
    assert made.batches["cap"].to_pylist() == [4] * len(sizes)


def test_a_bucket_with_fewer_jobs_than_an_odd_cap_stays_under_it(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"seed": [1, 2, 3, 4, 5]})
    (bucket,) = plan_of(reading).buckets
    wide = replace(SPEC, cap=lambda width, height, num_frames: 6)
    made = plan_of(reading, model_spec=lambda name: wide)
    assert made.batches["size"].to_pylist() == [6]
    lowered = plan_of(reading, history_of(caps={bucket.key: 3}), model_spec=lambda name: wide)
    assert lowered.batches["size"].to_pylist() == [3, 3]
    assert lowered.batches["cap"].to_pylist() == [3, 3]


def test_memory_lowers_a_cap_and_never_raises_it(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"seed": list(range(8))})
    (bucket,) = plan_of(reading).buckets
    for known, cap in ((2, 2), (64, 4)):
        made = plan_of(reading, history_of(caps={bucket.key: known, "another": 1}))
        assert set(made.batches["cap"].to_pylist()) == {cap}


def test_a_measured_cap_takes_the_place_of_the_rule_and_memory_may_lower_it_too(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"seed": list(range(8))})
    (bucket,) = plan_of(reading).buckets
    for probed, lowered, cap, source in (
        ({}, {}, 4, "rule"),
        ({}, {bucket.key: 2}, 2, "out of memory"),
        ({bucket.key: 16}, {}, 16, "probe"),
        ({bucket.key: 1}, {}, 1, "probe"),
        ({bucket.key: 16}, {bucket.key: 8}, 8, "out of memory"),
        ({bucket.key: 16}, {bucket.key: 32}, 16, "probe"),
        ({"another": 1}, {"another": 1}, 4, "rule"),
    ):
        made = plan_of(reading, history_of(probed=probed, caps=lowered))
        assert set(made.batches["cap"].to_pylist()) == {cap}
        assert made.cap_sources == (source,)


def test_the_model_is_asked_for_the_cap_of_the_rendered_shape(tmp_path: Path) -> None:
    asked: list[tuple[int, int, int]] = []

    def cap(width: int, height: int, num_frames: int) -> int:
        asked.append((width, height, num_frames))
        return 2

    reading = read_columns(tmp_path, {"width": [250], "height": [130], "num_frames": [15]})
    plan_of(reading, model_spec=lambda name: replace(SPEC, cap=cap))
    assert asked == [(256, 144, 17)]


def test_sizes_that_render_alike_share_a_batch(tmp_path: Path) -> None:
    made = plan_of(read_columns(tmp_path, {"width": [256, 250], "num_frames": [17, 15]}))
    (jobs,) = (made.batch(0).jobs,)
    assert made.batches.num_rows == 1
    assert [(job.width, job.num_frames) for job in jobs] == [(256, 17), (250, 15)]


SPLITTING: dict[str, list[Any]] = {
    "width": [64, 96],
    "height": [64, 96],
    "num_frames": [17, 21],
    "steps": [4, 8],
    "guidance_scale": [1.0, 5.0],
    "guidance_scale_2": [1.0, 5.0],
    "flow_shift": [3.0, 5.0],
    "model": ["tiny", "moe"],
}
TOGETHER: dict[str, list[Any]] = {
    "seed": [1, 2],
    "fps": [8.0, 24.0],
    "negative_prompt": ["a", "b"],
    "price": [1.0, 2.0],
    "width": [62, 64],
}


@pytest.mark.parametrize("column", SPLITTING)
def test_jobs_that_differ_in_a_setting_of_the_batch_are_apart(tmp_path: Path, column: str) -> None:
    model = {} if column == "model" else {"model": ["moe", "moe"]}
    made = plan_of(read_columns(tmp_path, model | {column: SPLITTING[column]}))
    assert made.batches.num_rows == len(made.buckets) == 2


@pytest.mark.parametrize("column", TOGETHER)
def test_jobs_that_differ_in_their_own_settings_are_together(tmp_path: Path, column: str) -> None:
    made = plan_of(read_columns(tmp_path, {column: TOGETHER[column]}))
    assert made.batches.num_rows == len(made.buckets) == 1


def random_columns(seed: int, count: int = 200) -> dict[str, list[Any]]:
    chance = random.Random(seed)
    return {
        "id": [f"id{n:03d}" for n in range(count)],
        "prompt": [f"prompt {n}" for n in range(count)],
        "width": [chance.choice([64, 66, 96, 128]) for _ in range(count)],
        "num_frames": [chance.choice([1, 15, 17]) for _ in range(count)],
        "steps": [chance.choice([4, 8]) for _ in range(count)],
        "model": [chance.choice(["tiny", "moe", None]) for _ in range(count)],
        "guidance_scale": [chance.choice([1.0, None]) for _ in range(count)],
        "priority": [chance.choice([0, 0, 0, 5]) for _ in range(count)],
        "customer": [chance.choice(["a", None]) for _ in range(count)],
    }


@pytest.mark.parametrize("seed", range(5))
def test_every_job_is_in_one_batch_of_its_bucket(tmp_path: Path, seed: int) -> None:
    reading = read_columns(tmp_path, random_columns(seed))
    made = plan_of(reading)
    assert sorted(all_ids(made)) == sorted(reading.jobs["id"].to_pylist())
    assert made.jobs["id"].to_pylist() == all_ids(made)
    rows = made.jobs.select(BUCKET_COLUMNS).to_pylist()
    end = 0
    for number, batch in enumerate(made.batches.to_pylist()):
        assert (batch["number"], batch["start"]) == (number, end)
        end = batch["stop"]
        assert {bucket_from_row(row) for row in rows[batch["start"] : end]} == {made.buckets[batch["bucket"]]}
        assert 1 <= end - batch["start"] <= batch["size"] <= batch["cap"]
    assert end == made.jobs.num_rows


@pytest.mark.parametrize("seed", range(5))
def test_batches_come_by_priority_then_model_then_bucket(tmp_path: Path, seed: int) -> None:
    made = plan_of(read_columns(tmp_path, random_columns(seed)))
    batches = made.batches.to_pylist()
    keys = [(-batch["priority"], batch["bucket"]) for batch in batches]
    assert keys == sorted(keys)
    models = [bucket.model for bucket in made.buckets]
    assert models == sorted(models)
    priority = made.jobs["priority"].to_pylist()
    row = made.jobs["row"].to_pylist()
    for bucket in range(len(made.buckets)):
        rows = [n for one in batches if one["bucket"] == bucket for n in range(one["start"], one["stop"])]
        order = [(-priority[n], row[n]) for n in rows]
        assert order == sorted(order)
    for batch in batches:
        assert batch["priority"] == priority[batch["start"]]


@pytest.mark.parametrize("seed", range(5))
def test_buckets_and_batch_sizes_do_not_depend_on_the_order_of_rows(tmp_path: Path, seed: int) -> None:
    table = pa.table(random_columns(seed))
    order = list(range(table.num_rows))
    random.Random(seed).shuffle(order)
    plans = []
    for name, rows in (("one", table), ("two", table.take(order))):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(rows, path)
        plans.append(plan_of(read_file(path)))
    one, two = plans
    assert one.buckets == two.buckets
    assert one.batches.equals(two.batches)
    names = ["id", "fingerprint", "seed"]
    assert one.jobs.select(names).sort_by("id").equals(two.jobs.select(names).sort_by("id"))


def test_planning_twice_gives_the_same_plan(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, random_columns(9))
    one, two = plan_of(reading), plan_of(reading)
    assert one.jobs.equals(two.jobs)
    assert one.batches.equals(two.batches)


def test_two_models_do_not_interleave(tmp_path: Path) -> None:
    made = plan_of(read_columns(tmp_path, {"model": ["tiny", "moe"] * 8}))
    models = [made.buckets[index].model for index in made.batches["bucket"].to_pylist()]
    assert models == ["moe", "moe", "tiny", "tiny"]


def test_a_batch_carries_its_jobs_and_bucket(tmp_path: Path) -> None:
    made = plan_of(read_columns(tmp_path, {"id": ["a"], "fps": [23.976], "seed": [5], "width": [250]}))
    batch = made.batch(0)
    assert (batch.number, batch.size, batch.cap) == (0, 1, 4)
    (job,) = batch.jobs
    assert (job.id, str(job.fps), job.seed, job.width) == ("a", "24000/1001", 5, 250)
    assert batch.bucket == Bucket(
        model="tiny",
        revision="rev-1",
        preset="exact",
        width=256,
        height=64,
        num_frames=17,
        steps=4,
        guidance_scale=5.0,
        guidance_scale_2=None,
        flow_shift=3.0,
    )


def test_an_empty_manifest_is_an_empty_plan(tmp_path: Path) -> None:
    path = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.nulls(0)}), path)
    made = plan_of(read_file(path))
    assert (made.jobs.num_rows, made.batches.num_rows, made.buckets) == (0, 0, ())
    assert made.jobs.schema.names == made.exhausted.schema.names == WITH_REASON
    assert made.reused.schema.names == [*JOBS_SCHEMA.names, "clip", "reason"]
    assert made.batches.schema.equals(BATCHES_SCHEMA)


# ---- what was delivered before -----------------------------------------------------------------------


def reasons(made: Plan) -> dict[str, str | None]:
    return dict(zip(made.jobs["id"].to_pylist(), made.jobs["reason"].to_pylist(), strict=True))


def test_nothing_delivered_renders_all_without_a_reason(tmp_path: Path) -> None:
    assert reasons(plan_of(read_columns(tmp_path, {"id": ["a", "b"]}))) == {"a": None, "b": None}


def test_delivered_jobs_are_reused_with_their_file(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"id": ["a", "b"]})
    made = plan_of(reading, history_of(reading))
    assert made.jobs.num_rows == made.batches.num_rows == 0
    assert made.reused["clip"].to_pylist() == ["a.mp4", "b.mp4"]
    assert made.reused["reason"].to_pylist() == ["delivered before"] * 2
    assert made.reused.select(JOBS_SCHEMA.names).equals(reading.jobs)


def test_changed_settings_are_named(tmp_path: Path) -> None:
    columns = {"id": list("abcdef"), "prompt": ["p"] * 6, "seed": [1] * 6, "steps": [4] * 6, "fps": [8.0] * 6}
    before = read_columns(tmp_path, columns)
    after = columns | {
        "prompt": ["p", "new", "p", "p", "p", "p"],
        "seed": [1, 1, 2, 1, 1, 1],
        "steps": [4, 4, 8, 4, 4, 4],
        "fps": [8.0, 8.0, 8.0, 23.976, 8.0, 8.0],
        "width": [64, 64, 64, 64, 96, 64],
        "negative_prompt": [None, None, None, None, None, ""],
    }
    made = plan_of(read_columns(tmp_path, after), history_of(before))
    assert made.reused["id"].to_pylist() == ["a"]
    assert reasons(made) == {
        "b": "prompt changed",
        "c": "seed, steps changed",
        "d": "fps changed",
        "e": "size changed",
        "f": "negative_prompt changed",
    }


def test_a_setting_that_was_null_before_is_named(tmp_path: Path) -> None:
    before = read_columns(tmp_path, {"id": ["a"], "model": ["tiny"], "guidance_scale_2": [None]})
    after = read_columns(tmp_path, {"id": ["a"], "model": ["moe"], "guidance_scale_2": [2.0], "fps": [8]})
    assert reasons(plan_of(after, history_of(before))) == {"a": "guidance_scale_2, model changed"}


def test_encoder_settings_are_named(tmp_path: Path) -> None:
    before = read_columns(tmp_path, {"id": ["a"]})
    after = read_columns(tmp_path, {"id": ["a"]}, crf=30)
    assert reasons(plan_of(after, history_of(before))) == {"a": "crf changed"}


def test_settings_the_ledger_does_not_know_are_changed_all_the_same(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"id": ["a", "b"]})
    history = history_of(reading, clips={"fingerprint": ["0" * 64, "0" * 64]})
    empty = replace(history, previous=lambda ids: reading.jobs.slice(0, 1))
    assert reasons(plan_of(reading, empty)) == {"a": "settings changed", "b": "settings changed"}


def test_a_missing_file_is_rendered_again(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"id": ["a", "b"]})
    made = plan_of(reading, history_of(reading, clips={"present": [True, False]}))
    assert made.reused["id"].to_pylist() == ["a"]
    assert reasons(made) == {"b": "file missing or damaged"}


def test_the_same_settings_under_another_id_are_another_clip(tmp_path: Path) -> None:
    before = read_columns(tmp_path, {"id": ["a"], "prompt": ["p"], "seed": [1]})
    after = read_columns(tmp_path, {"id": ["b"], "prompt": ["p"], "seed": [1]})
    assert reasons(plan_of(after, history_of(before))) == {"b": None}


def test_going_back_to_earlier_settings_reuses_the_earlier_clip(tmp_path: Path) -> None:
    old = read_columns(tmp_path, {"id": ["a"], "prompt": ["old"]})
    new = read_columns(tmp_path, {"id": ["a"], "prompt": ["new"]})
    first, second = history_of(old), history_of(new, clips={"file": ["newer.mp4"]})
    both = replace(first, clips=pa.concat_tables([first.clips, second.clips]))
    assert plan_of(old, both).reused["clip"].to_pylist() == ["a.mp4"]
    assert plan_of(new, both).reused["clip"].to_pylist() == ["newer.mp4"]


def test_of_several_clips_the_latest_that_is_there_is_reused(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"id": ["a"]})
    clips = history_of(reading).clips
    many = {
        "id": ["a"] * 3,
        "fingerprint": clips["fingerprint"].to_pylist() * 3,
        "model_revision": ["rev-1"] * 3,
    }
    many |= {"file": ["1.mp4", "2.mp4", "3.mp4"], "numerics": ["n1"] * 3, "present": [True, True, False]}
    history = replace(history_of(reading), clips=pa.table(many, schema=clips.schema))
    assert plan_of(reading, history).reused["clip"].to_pylist() == ["2.mp4"]


def test_clips_of_other_manifests_do_not_disturb(tmp_path: Path) -> None:
    other = read_columns(tmp_path, {"id": ["x", "y", "z"]})
    reading = read_columns(tmp_path, {"id": ["a", "y"], "prompt": ["new", "prompt 1"]})
    made = plan_of(reading, history_of(other))
    assert made.reused["clip"].to_pylist() == ["y.mp4"]
    assert reasons(made) == {"a": None}


CHANGED = {"model_revision": ["old", "rev-1", "old", None], "numerics": ["n1", "n0", "n0", None]}


@pytest.mark.parametrize(
    ("refresh", "again"),
    [
        (set(), {}),
        ({"model"}, {"a": "model revision changed", "c": "model revision changed"}),
        ({"numerics"}, {"b": "numerics changed", "c": "numerics changed"}),
        (
            {"model", "numerics"},
            {
                "a": "model revision changed",
                "b": "numerics changed",
                "c": "model revision changed; numerics changed",
            },
        ),
    ],
)
def test_refresh_renders_again_what_has_changed(
    tmp_path: Path, refresh: set[str], again: dict[str, str]
) -> None:
    reading = read_columns(tmp_path, {"id": list("abcd")})
    made = plan_of(reading, history_of(reading, clips=CHANGED), refresh=frozenset(refresh))
    assert reasons(made) == again
    assert set(made.reused["id"].to_pylist()) == set("abcd") - again.keys()


def test_reuse_says_what_rendered_the_clip(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"id": list("abcd")})
    made = plan_of(reading, history_of(reading, clips=CHANGED))
    assert made.reused["reason"].to_pylist() == [
        "delivered before, by another model revision",
        "delivered before, by other numerics",
        "delivered before, by another model revision, by other numerics",
        "delivered before",
    ]


# ---- failures ----------------------------------------------------------------------------------------


def test_failed_jobs_are_tried_again_until_the_third_time(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"id": list("abcd")})
    prints = reading.jobs["fingerprint"].to_pylist()
    failures = [
        {"id": "b", "fingerprint": prints[1], "number": 1, "reason": "lost"},
        {"id": "c", "fingerprint": prints[2], "number": 2, "reason": None},
        {"id": "d", "fingerprint": prints[3], "number": 3, "reason": "non-finite output"},
    ]
    made = plan_of(reading, history_of(failures=failures))
    assert reasons(made) == {
        "a": None,
        "b": "failed before (attempt 2 of 3)",
        "c": "failed before (attempt 3 of 3)",
    }
    assert made.exhausted["id"].to_pylist() == ["d"]
    assert made.exhausted["reason"].to_pylist() == ["gave up after 3 attempts: non-finite output"]
    assert made.exhausted.schema.names == WITH_REASON


def test_a_changed_job_counts_from_the_start(tmp_path: Path) -> None:
    before = read_columns(tmp_path, {"id": ["a"], "prompt": ["old"]})
    failures = [{"id": "a", "fingerprint": before.jobs["fingerprint"][0].as_py(), "number": 3, "reason": "x"}]
    after = read_columns(tmp_path, {"id": ["a"], "prompt": ["new"]})
    assert reasons(plan_of(after, history_of(failures=failures))) == {"a": None}


def test_a_failure_adds_to_why_it_is_rendered_again(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"id": ["a"]})
    failures = [
        {"id": "a", "fingerprint": reading.jobs["fingerprint"][0].as_py(), "number": 1, "reason": "x"}
    ]
    made = plan_of(reading, history_of(reading, clips={"present": [False]}, failures=failures))
    assert reasons(made) == {"a": "file missing or damaged; failed before (attempt 2 of 3)"}


def test_a_delivered_clip_outweighs_failures(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"id": ["a"]})
    failures = [
        {"id": "a", "fingerprint": reading.jobs["fingerprint"][0].as_py(), "number": 3, "reason": "x"}
    ]
    made = plan_of(reading, history_of(reading, failures=failures))
    assert (made.reused.num_rows, made.exhausted.num_rows) == (1, 0)


# ---- limit and select --------------------------------------------------------------------------------


def test_limit_takes_the_highest_priority_then_the_first(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"id": list("abcde"), "priority": [0, 0, 5, 0, 5]})
    made = plan_of(reading, limit=3)
    assert sorted(made.jobs["id"].to_pylist()) == ["a", "c", "e"]
    assert made.left_out["id"].to_pylist() == ["b", "d"]
    assert plan_of(reading, limit=9).left_out.num_rows == 0
    assert plan_of(reading, limit=0).jobs.num_rows == 0


def test_limit_counts_only_what_is_rendered(tmp_path: Path) -> None:
    before = read_columns(tmp_path, {"id": ["a", "b"], "prompt": ["1", "2"]})
    after = read_columns(tmp_path, {"id": list("abcd"), "prompt": ["1", "2", "3", "4"]})
    made = plan_of(after, history_of(before), limit=1)
    assert made.jobs["id"].to_pylist() == ["c"]
    assert (made.reused.num_rows, made.left_out["id"].to_pylist()) == (2, ["d"])


def test_select_takes_ids_in_any_unicode_form(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"id": ["caf\u00e9", "b", "c"], "width": [64, 64, 65]})
    made = plan_of(reading, select=("cafe\u0301",))
    assert made.jobs["id"].to_pylist() == ["caf\u00e9"]
    assert made.left_out["id"].to_pylist() == ["b"]
    assert plan_of(reading, select=("c",)).jobs.num_rows == 0
    assert made.left_out.schema.names == WITH_REASON


def test_select_names_an_id_that_is_not_there(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"id": ["a", "b"]})
    with pytest.raises(UsageError, match="`nope`") as caught:
        plan_of(reading, select=("a", "nope"))
    assert "`a`" not in caught.value.message


def test_settings_survive_to_the_job(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"guidance_scale": [1.0, 8.0], "steps": [4, 8], "seed": [1, 2]})
    made = plan_of(reading)
    jobs = [job for number in range(2) for job in made.batch(number).jobs]
    assert {(job.guidance_scale, job.steps, job.seed) for job in jobs} == {(1.0, 4, 1), (8.0, 8, 2)}
    assert by_row(reading, "steps") == {0: 4, 1: 8}
    assert model_spec(Weights("tiny")) is SPEC
