"""Which prompts go to which worker, before which batch."""

import pytest

import jobs.ahead
from jobs.ahead import TextsAhead
from tests.fake_engine import Knobs, read_encoded, read_log
from tests.run_cases import planned, query, render

SHARED = {"width": 64, "height": 64, "num_frames": 5, "steps": 2, "guidance_scale": 1.0}


def rows_of(count, **changes):
    return [{"id": f"{index:03}", "prompt": f"prompt {index}", **SHARED, **changes} for index in range(count)]


def shares(plan, *, num_workers=1):
    ahead = TextsAhead(plan, num_workers=num_workers)
    return [ahead.share(number) for number in range(plan.batches.num_rows)]


def plan_of(folder, rows):
    return planned(folder, rows).plan


def test_one_worker_encodes_everything_before_its_first_batch(tmp_path):
    first, *later = shares(plan_of(tmp_path, rows_of(40)))
    assert sorted(first) == sorted(f"prompt {index}" for index in range(40))
    assert len(later) > 1
    assert set(later) == {()}


def test_a_text_is_encoded_once_however_often_it_is_asked_for(tmp_path):
    rows = [row | {"prompt": f"prompt {index % 3}"} for index, row in enumerate(rows_of(40))]
    (first, *_) = shares(plan_of(tmp_path, rows))
    assert sorted(first) == ["prompt 0", "prompt 1", "prompt 2"]


@pytest.mark.parametrize(("guidance_scale", "expected"), [(1.0, 9), (1.5, 10)])
def test_negative_prompts_are_encoded_where_they_are_looked_at(tmp_path, guidance_scale, expected):
    rows = rows_of(9, guidance_scale=guidance_scale, negative_prompt="dull")
    (first, *_) = shares(plan_of(tmp_path, rows))
    assert len(first) == expected


def test_workers_share_a_window_and_its_first_batches_carry_it(tmp_path):
    first, second, *later = shares(plan_of(tmp_path, rows_of(40)), num_workers=2)
    assert abs(len(first) - len(second)) <= 1
    assert sorted(first + second) == sorted(f"prompt {index}" for index in range(40))
    assert set(later) == {()}


def test_a_long_plan_is_encoded_window_by_window(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.ahead, "TEXTS_AHEAD", 12)
    plan = plan_of(tmp_path, rows_of(40))
    found = shares(plan)
    texts = [text for share in found for text in share]
    assert sorted(texts) == sorted(f"prompt {index}" for index in range(40))
    assert max(map(len, found)) < 12 + max(plan.batches["size"].to_pylist())
    known = set()
    for number, share in enumerate(found):
        known |= set(share)
        assert {job.prompt for job in plan.batch(number).jobs} <= known


def test_another_models_prompts_wait_for_its_first_batch(tmp_path):
    (tmp_path / "vgbatch.toml").write_text('[models]\none = "builtin"\ntwo = "builtin"\n')
    rows = [row | {"model": ("one", "two")[index % 2]} for index, row in enumerate(rows_of(20))]
    plan = plan_of(tmp_path, rows)
    found = shares(plan)
    for number, share in enumerate(found):
        model = plan.batch(number).bucket.model
        assert len(share) in (0, 10)
        assert all(int(text.split()[1]) % 2 == ("one", "two").index(model) for text in share)
    assert sum(map(len, found)) == 20


def test_a_run_encodes_its_prompts_first_and_counts_that_to_loading(tmp_path):
    log = tmp_path / "log"
    rows = rows_of(10)
    render(tmp_path, rows, knobs=Knobs(log=log, encode_s=0.1))
    assert [sorted(texts) for texts in read_encoded(log)] == [sorted(row["prompt"] for row in rows)]
    assert "encode" in log.read_text().splitlines()[0]
    assert len(read_log(log)) > 1
    ((first, *later),) = zip(*query(tmp_path, "SELECT load_s FROM batches ORDER BY batch"), strict=True)
    assert first > 0.1
    assert max(later) == 0.0
    assert query(tmp_path, "SELECT max(device_s) < 0.1 FROM batches") == [(True,)]


def test_prompts_that_cannot_be_encoded_ahead_fail_no_job(tmp_path, capfd):
    summary = render(tmp_path, rows_of(2), knobs=Knobs(encode_s=-1))
    assert (summary.num_delivered, summary.exit_code) == (2, 0)
    assert query(tmp_path, "SELECT state FROM attempts") == [("delivered",)] * 2
    assert "2 prompts could not be encoded ahead: ValueError" in capfd.readouterr().err
