from __future__ import annotations

import math
import random
from dataclasses import fields
from datetime import timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from cost.margin import NS_PER_S, Economics, GpuTime
from cost.prices import Prices
from cost.report import Line, Report, build_report
from cost.tally import SHARED, UNTAGGED, Tally
from manifests.errors import UsageError
from tests.ledger_tables import START, LedgerBuilder

UTC_ZONE = ZoneInfo("UTC")
THREE_SIXTY = Prices(gpu_per_hour=Decimal("3.60"))
PARTS = ("useful", "wasted", "load", "padding", "idle")
HOUR = timedelta(hours=1)


def report(ledger: LedgerBuilder, *, prices: Prices = THREE_SIXTY, **options: object) -> Report:
    return build_report(ledger.tables(), prices=prices, **{"tz": UTC_ZONE, **options})  # type: ignore[arg-type]


def seconds(line: Line) -> dict[str, float]:
    return {part: getattr(line.tally.time, f"{part}_ns") / NS_PER_S for part in PARTS}


def parts(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0) | seconds


def counts(tally: Tally) -> tuple[int, int, int, int]:
    return tally.num_attempts, tally.num_delivered, tally.num_failed, tally.num_lost


def names(made: Report) -> list[str]:
    return [line.tally.name for line in made.groups]


def total_usd(line: Line) -> Decimal:
    assert line.cost is not None
    return line.cost.total_usd


def test_a_batch_of_four_costs_its_time_once_and_each_job_a_quarter() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=40.0)
    ledger.batch("abcd", device_s=40.0)
    for id in "abcd":
        ledger.job(id, tags={"job": id})
    made = report(ledger, by="job")
    assert total_usd(made.total) == Decimal("0.04")
    assert [total_usd(line) for line in made.groups] == [Decimal("0.01")] * 4
    assert made.total.full_load.cost_per_video_usd == Decimal("0.01")


def test_a_batch_on_two_devices_costs_twice_as_much() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=80.0, num_devices=2)
    ledger.batch("abcd", device_s=80.0, device="cuda:0,cuda:1")
    assert total_usd(report(ledger).total) == Decimal("0.08")


def test_failed_and_repeated_attempts_are_wasted_and_only_delivered_videos_earn() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=80.0)
    ledger.batch("ab", failed="d", lost="c", device_s=40.0)
    ledger.batch(failed="c", batch=1, device_s=10.0)
    ledger.batch("c", batch=2, device_s=10.0)
    ledger.batch(failed="d", batch=3, device_s=10.0)
    ledger.batch(failed="d", batch=4, device_s=10.0)
    made = report(ledger, prices=Prices(gpu_per_hour=Decimal("3.6"), per_video=Decimal("0.5")))
    assert seconds(made.total) == parts(useful=30.0, wasted=50.0)
    assert counts(made.total.tally) == (8, 3, 4, 1)
    assert (made.total.tally.num_videos, made.total.tally.num_undelivered) == (3, 1)
    assert made.total.value_usd == Decimal("1.5")
    assert total_usd(made.total) == Decimal("0.08")


def test_a_later_run_keeps_the_tallies_of_an_earlier_one() -> None:
    ledger = LedgerBuilder()
    ledger.run("r1", device_s=40.0)
    ledger.batch("abc", failed="d")
    ledger.run("r2", device_s=10.0, started_at=START + HOUR)
    ledger.batch("d", run_id="r2", device_s=10.0, started_at=START + HOUR)
    made = report(ledger, by="run")
    assert counts(made.total.tally) == (5, 4, 1, 0)
    assert [counts(line.tally) for line in made.groups] == [(4, 3, 1, 0), (1, 1, 0, 0)]
    assert made.total.tally.num_undelivered == 0


def test_a_job_that_never_worked_is_counted_once_where_it_was_tried_last() -> None:
    ledger = LedgerBuilder()
    for number, run_id in enumerate(("r2", "r1")):
        started_at = START + number * HOUR
        ledger.run(run_id, device_s=10.0, started_at=started_at)
        ledger.batch(failed="a", run_id=run_id, device_s=10.0, started_at=started_at)
    made = report(ledger, by="run")
    assert names(made) == ["r2", "r1"]
    assert [line.tally.num_undelivered for line in made.groups] == [0, 1]


def test_padding_loading_and_idle_time_have_their_own_parts() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=100.0)
    ledger.batch("abc", size=4, device_s=40.0, load_s=25.0)
    made = report(ledger)
    assert seconds(made.total) == parts(useful=30.0, load=25.0, padding=10.0, idle=35.0)
    assert made.total.as_paid.gpu_s_per_video == pytest.approx(Decimal(100) / 3)
    assert made.total.full_load.gpu_s_per_video == pytest.approx(Decimal(65) / 3)


def test_a_killed_run_whose_heartbeat_is_behind_held_at_least_what_it_used() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=30.0, state="running")
    ledger.batch("abcd", device_s=40.0)
    made = report(ledger)
    assert made.total.tally.time == GpuTime(useful_ns=40 * NS_PER_S)


def test_a_batch_that_recorded_no_attempts_is_wasted_not_padding() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=40.0)
    ledger.batch(size=4, num_jobs=3, device_s=40.0, state="out of memory")
    assert seconds(report(ledger).total) == parts(wasted=30.0, padding=10.0)


def test_a_run_without_batches_is_idle() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=12.0)
    assert seconds(report(ledger).total)["idle"] == 12.0


def test_a_fingerprint_earns_once_however_often_it_is_rendered() -> None:
    ledger = LedgerBuilder()
    ledger.run("r1", device_s=40.0)
    ledger.batch("abcd")
    ledger.run("r2", device_s=40.0, started_at=START + HOUR)
    ledger.batch("ab", run_id="r2", started_at=START + HOUR)
    made = report(ledger, prices=Prices(per_video=Decimal(2)), by="run")
    assert made.total.value_usd == 8
    assert [line.value_usd for line in made.groups] == [8, 0]
    assert [line.tally.num_rendered_again for line in made.groups] == [0, 2]


def test_two_ids_with_one_fingerprint_are_one_video() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=1.0)
    ledger.clip("a", fingerprint="same")
    ledger.clip("b", fingerprint="same")
    assert report(ledger, prices=Prices(per_video=Decimal(2))).total.value_usd == 2


def test_the_latest_price_of_a_job_counts_and_goes_before_the_flags() -> None:
    ledger = LedgerBuilder()
    ledger.run("r1", device_s=20.0)
    ledger.run("r2", device_s=0.0, started_at=START + HOUR)
    ledger.run("r3", device_s=0.0, started_at=START + 2 * HOUR)
    ledger.batch("abc", device_s=20.0)
    ledger.job("a", run_id="r2", price=Decimal("7"), state="reused")
    ledger.job("a", run_id="r1", price=Decimal("5"))
    ledger.job("a", run_id="r3", price=None, state="reused")
    ledger.job("b", price=Decimal("0"))
    ledger.job("c")
    assert report(ledger).total.value_usd == 7
    assert report(ledger, prices=Prices(per_video=Decimal("0.25"))).total.value_usd == Decimal("7.25")
    assert any("1 of 3 videos without a price earn" in note for note in report(ledger).notes)


def test_a_price_per_second_is_times_the_length_of_the_clip() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=1.0)
    ledger.clip("a", num_frames=80, fps_num=16)
    ledger.clip("b", num_frames=240, fps_num=24000, fps_den=1001)
    made = report(ledger, prices=Prices(per_second=Decimal("0.1")))
    assert made.total.value_usd == Decimal("1.501")
    assert made.total.tally.clip_ns == 15_010_000_000


def test_an_adopted_clip_earns_although_its_time_is_not_known() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=10.0)
    ledger.clip("a", batch=None, adopted=True)
    made = report(ledger, prices=Prices(per_video=Decimal(2)), by="bucket")
    assert made.total.value_usd == 2
    assert names(made) == [SHARED]
    assert [line.value_usd for line in made.groups] == [2]


def test_no_value_or_no_gpu_price_is_not_available() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=40.0)
    ledger.batch("abcd")
    made = report(ledger, prices=Prices())
    assert (made.total.cost, made.total.value_usd) == (None, None)
    assert made.total.full_load.gpu_s_per_video == 10
    assert made.total.full_load.cost_per_video_usd is None
    assert sum("--gpu-price" in note for note in made.notes) == 1


def test_zero_prices_give_zeros_and_no_margin() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=40.0)
    ledger.batch("abcd")
    made = report(ledger, prices=Prices(gpu_per_hour=Decimal(0), per_video=Decimal(0)))
    assert (total_usd(made.total), made.total.value_usd, made.total.full_load.margin_frac) == (0, 0, None)
    earning = report(ledger, prices=Prices(gpu_per_hour=Decimal(0), per_video=Decimal(1)))
    assert earning.total.full_load.margin_frac == 1


@pytest.mark.parametrize("by", [None, "bucket", "model", "preset", "day", "run", "customer"])
def test_an_empty_ledger_gives_zeros_and_nothing_per_video(by: str | None) -> None:
    prices = Prices(gpu_per_hour=Decimal("2.5"), per_video=Decimal(1), utilization=Decimal("0.5"))
    made = report(LedgerBuilder(), prices=prices, by=by)
    assert (total_usd(made.total), made.total.value_usd, made.groups, made.durations) == (0, 0, (), ())
    assert all(getattr(made.total.as_paid, field.name) is None for field in fields(Economics))


def test_a_run_of_zero_seconds_divides_nothing_by_zero() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=0.0)
    ledger.batch("a", device_s=0.0)
    made = report(ledger, prices=Prices(gpu_per_hour=Decimal(2), per_video=Decimal(1)))
    assert made.total.full_load.videos_per_gpu_hour is None
    assert made.total.full_load.value_per_gpu_hour_usd is None
    assert made.total.full_load.cost_per_video_usd == 0
    assert made.total.full_load.margin_frac == 1


def test_groups_by_tag_leave_padding_loading_and_idle_time_shared() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=100.0)
    ledger.batch("abc", size=4, device_s=40.0, load_s=5.0)
    ledger.job("a", tags={"customer": "acme"})
    ledger.job("b", tags={"customer": "(weird) [name]"})
    ledger.job("c", tags={"campaign": "x"})
    made = report(ledger, by="customer")
    assert set(names(made)[:2]) == {"acme", "(weird) [name]"}
    assert names(made)[2:] == [UNTAGGED, SHARED]
    assert seconds(made.groups[-1]) == parts(load=5.0, padding=10.0, idle=55.0)
    assert any(SHARED in note for note in made.notes)


def test_a_rejected_row_with_the_id_of_a_job_does_not_count_its_time_twice() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=40.0)
    ledger.batch("abcd")
    ledger.job("a", tags={"customer": "acme"})
    ledger.job("a", tags={"customer": "acme"}, state="rejected", fingerprint=None)
    made = report(ledger, by="customer")
    assert sum(total_usd(line) for line in made.groups) == total_usd(made.total) == Decimal("0.04")


def test_an_unknown_grouping_names_what_there_is() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=1.0)
    ledger.job("a", tags={"customer": "acme"})
    with pytest.raises(UsageError, match="buckets") as caught:
        report(ledger, by="buckets")
    assert caught.value.hint == "did you mean bucket?"
    with pytest.raises(UsageError) as caught:
        report(ledger, by="zzz")
    assert "bucket, model, preset, day, run, customer" in str(caught.value.hint)


def test_buckets_with_one_label_are_told_apart() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=50.0)
    ledger.batch("a", device_s=20.0, bucket="k1")
    ledger.batch("b", batch=1, device_s=10.0, bucket="k2", preset="fast")
    ledger.batch("c", batch=2, device_s=9.0, bucket="k3", preset="fast")
    ledger.batch("d", batch=3, device_s=8.0, bucket="k4", steps=4)
    assert names(report(ledger, by="bucket")) == [
        "832x480x81 50 steps builtin exact",
        "832x480x81 50 steps builtin fast k2",
        "832x480x81 50 steps builtin fast k3",
        "832x480x81 4 steps",
        SHARED,
    ]


def test_a_preset_has_the_time_the_tries_and_the_videos_of_its_batches() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=50.0)
    ledger.batch("ab", device_s=10.0, load_s=2.0)
    ledger.batch("c", failed="d", batch=1, device_s=20.0, preset="fast")
    made = report(ledger, by="preset")
    assert names(made) == ["fast", "exact", SHARED]
    assert [seconds(line) for line in made.groups] == [
        parts(useful=10.0, wasted=10.0),
        parts(useful=10.0, load=2.0),
        parts(idle=18.0),
    ]
    assert [line.tally.num_videos for line in made.groups] == [1, 2, 0]


def test_a_batch_without_a_bucket_key_still_counts() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=40.0)
    ledger.batch("abcd", bucket=None)
    made = report(ledger, by="bucket")
    assert names(made) == ["832x480x81 50 steps"]
    assert total_usd(made.total) == Decimal("0.04")


def test_percentiles_are_nearest_rank_per_bucket() -> None:
    rng = random.Random(3)
    ledger = LedgerBuilder()
    ledger.run(device_s=10_000.0)
    times = {bucket: [rng.randrange(1, 500) / 8 for _ in range(num)] for bucket, num in (("x", 37), ("y", 1))}
    number = 0
    for steps, bucket in enumerate(times):
        for device_s in times[bucket]:
            ledger.batch("a", batch=number, bucket=bucket, steps=steps, device_s=device_s)
            number += 1
    ledger.batch(failed="a", batch=number, bucket="x", steps=0, device_s=1e6)
    made = report(ledger)
    assert [durations.num_clips for durations in made.durations] == [37, 1]
    for durations, values in zip(made.durations, times.values(), strict=True):
        ranked = sorted(values)
        expected = [ranked[math.ceil(quantile * len(ranked)) - 1] for quantile in (0.5, 0.95, 0.99)]
        assert [durations.p50_s, durations.p95_s, durations.p99_s] == expected


def night_of_the_clock_change() -> LedgerBuilder:
    """Across 2026-11-01 06:00Z, when New York's clocks go from 2 back to 1; and over midnight in Tokyo."""
    ledger = LedgerBuilder()
    ledger.run(device_s=40_000.0)
    for number, id in enumerate("abcdefghij"):
        ledger.batch(
            id, batch=number, device_s=60.0, load_s=1.5, started_at=START + number * timedelta(minutes=65)
        )
    return ledger


@pytest.mark.parametrize("by", [None, "day", "model"])
def test_time_zone_changes_the_days_only(by: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = night_of_the_clock_change().tables()
    zones = ["UTC", "America/New_York", "Asia/Tokyo", "Asia/Kathmandu", "Pacific/Kiritimati"]
    made = []
    for zone in zones:
        monkeypatch.setenv("TZ", zone)
        made.append(build_report(tables, prices=THREE_SIXTY, by=by, tz=ZoneInfo(zone)))
    assert all(other.total == made[0].total for other in made)
    for one in made:
        assert sum(total_usd(line) for line in one.groups) == (total_usd(one.total) if by else 0)
        assert all(min(seconds(line).values()) >= 0 for line in one.groups)


def test_days_are_those_of_the_zone() -> None:
    ledger = night_of_the_clock_change()
    assert names(report(ledger, by="day")) == ["2026-11-01"]
    assert names(report(ledger, by="day", tz=ZoneInfo("Asia/Tokyo"))) == ["2026-11-01", "2026-11-02"]
    early = report(ledger, by="day", tz=ZoneInfo("Pacific/Honolulu"))
    assert names(early) == ["2026-10-31", "2026-11-01"]
    assert [line.tally.num_videos for line in early.groups] == [5, 5]


def random_ledger(rng: random.Random) -> LedgerBuilder:
    ledger = LedgerBuilder()
    for run in range(rng.randrange(4)):
        run_id, start = f"r{run}", START + run * timedelta(hours=rng.randrange(30))
        ledger.run(run_id, started_at=start, device_s=rng.choice([0.0, rng.random() * 3000]))
        for id in "abcdefgh":
            tags = rng.choice([None, {}, {"customer": rng.choice("xyz")}])
            price = rng.choice([None, Decimal(rng.randrange(100)) / 100])
            ledger.job(id, run_id=run_id, tags=tags, price=price)
        for batch in range(rng.randrange(6)):
            ids = rng.sample("abcdefgh", rng.randrange(1, 8))
            delivered, rest = ids[: rng.randrange(len(ids) + 1)], ids
            rest = ids[len(delivered) :]
            num_failed = rng.randrange(len(rest) + 1)
            steps = rng.choice([4, 50])
            ledger.batch(
                "".join(delivered),
                failed="".join(rest[:num_failed]),
                lost="".join(rest[num_failed:]),
                run_id=run_id,
                batch=batch,
                size=rng.choice([len(ids), 8]),
                steps=steps,
                bucket=f"b{steps}",
                model=rng.choice(["m1", "m2"]),
                device_s=rng.choice([0.0, 1e-9, rng.random() * 700]),
                load_s=rng.choice([0.0, rng.random() * 90]),
                started_at=start + timedelta(minutes=rng.randrange(2000)),
            )
    return ledger


ADDITIVE = [field.name for field in fields(Tally) if field.name not in ("name", "time")]


def assert_adds_up(parts: list[Line], whole: Line) -> None:
    for name in ADDITIVE:
        assert sum(getattr(line.tally, name) for line in parts) == getattr(whole.tally, name), name
    for part in PARTS:
        assert sum(getattr(line.tally.time, f"{part}_ns") for line in parts) == getattr(
            whole.tally.time, f"{part}_ns"
        ), part
    assert sum(line.value_usd or 0 for line in parts) == (whole.value_usd or 0)


def exact_total_ns(tables: dict[str, pa.Table]) -> int:
    """What the devices were held for, counted another way: run by run, row by row."""
    total = 0
    batches = tables["batches"].to_pylist()
    for run in tables["runs"].to_pylist():
        used = sum(
            round(row["device_s"] * NS_PER_S) + round(row["load_s"] * NS_PER_S)
            for row in batches
            if row["run_id"] == run["run_id"]
        )
        total += max(used, round(run["device_s"] * NS_PER_S))
    return total


@pytest.mark.parametrize("seed", range(6))
def test_parts_groups_and_windows_of_random_ledgers_add_up(seed: int) -> None:
    rng = random.Random(seed)
    tables = random_ledger(rng).tables()
    prices = Prices(
        gpu_per_hour=Decimal(rng.randrange(1, 10**6)).scaleb(-5),
        per_second=rng.choice([None, Decimal("0.013")]),
    )
    zone = ZoneInfo(rng.choice(["UTC", "America/New_York", "Asia/Kathmandu"]))
    whole = build_report(tables, prices=prices, tz=zone).total
    assert whole.tally.time.total_ns == exact_total_ns(tables)
    assert whole.tally.num_attempts == tables["attempts"].num_rows
    for by in ("bucket", "model", "preset", "day", "run", "customer"):
        made = build_report(tables, prices=prices, by=by, tz=zone)
        assert made.total == whole
        assert_adds_up(list(made.groups), whole)
        assert sum(total_usd(line) for line in made.groups) == total_usd(whole)
    middle = START + timedelta(minutes=rng.randrange(3000))
    before = build_report(tables, prices=prices, until=middle, tz=zone).total
    after = build_report(tables, prices=prices, since=middle, tz=zone).total
    assert_adds_up([before, after], whole)


@pytest.mark.parametrize("seed", range(6))
def test_each_delivered_share_is_its_slot_of_the_batch(seed: int) -> None:
    tables = random_ledger(random.Random(seed)).tables()
    sizes = {
        (row["run_id"], row["batch"]): (round(row["device_s"] * NS_PER_S), row["size"])
        for row in tables["batches"].to_pylist()
    }
    useful_ns = 0.0
    for attempt in tables["attempts"].to_pylist():
        if attempt["state"] == "delivered":
            device_ns, size = sizes[attempt["run_id"], attempt["batch"]]
            useful_ns += device_ns / size
    whole = build_report(tables, prices=THREE_SIXTY, tz=UTC_ZONE).total
    assert whole.tally.time.useful_ns == pytest.approx(useful_ns, abs=tables["batches"].num_rows)


def test_an_instant_on_the_edge_is_in_the_window_that_starts_there() -> None:
    ledger = LedgerBuilder()
    ledger.run(device_s=40.0)
    ledger.batch("a", device_s=40.0)
    assert report(ledger, since=START).total.tally.num_attempts == 1
    assert report(ledger, until=START).total.tally.num_attempts == 0


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(UsageError, match="--since is not before --until"):
        report(LedgerBuilder(), since=START, until=START)
