from __future__ import annotations

import csv
import io
import json
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from rich.console import Console

from cost.formats import format_hours, format_percent, format_usd, render_csv, render_json, render_table
from cost.margin import NS_PER_HOUR
from cost.prices import Prices
from cost.report import Report, build_report
from tests.ledger_tables import LedgerBuilder

ALL_PRICES = Prices(gpu_per_hour=Decimal("3.60"), per_video=Decimal("0.50"), utilization=Decimal("0.70"))
NASTY = "\x1b[31mred\x1b[0m\n[bold]" + "x" * 200


def some_report(*, prices: Prices = ALL_PRICES, by: str | None = "customer") -> Report:
    ledger = LedgerBuilder()
    ledger.run(device_s=100.0)
    ledger.batch("abc", failed="d", device_s=40.0, load_s=7.5)
    ledger.job("a", tags={"customer": "acme"})
    ledger.job("b", tags={"customer": NASTY})
    return build_report(ledger.tables(), prices=prices, by=by, tz=ZoneInfo("UTC"))


def empty_report(prices: Prices) -> Report:
    return build_report(LedgerBuilder().tables(), prices=prices, tz=ZoneInfo("UTC"))


def table_text(report: Report, *, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    render_table(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (None, "n/a"),
        ("0", "$0.00"),
        ("0E-12", "$0.00"),
        ("0.04", "$0.04"),
        ("0.5", "$0.50"),
        ("0.123456", "$0.123"),
        ("0.0000231", "$0.0000231"),
        ("0.000000000001", "$0.000000000001"),
        ("0.9996", "$1.00"),
        ("1234.5", "$1,234.50"),
        ("-1.2", "-$1.20"),
        ("-0.00045678", "-$0.000457"),
    ],
)
def test_money_keeps_three_significant_digits(amount: str | None, text: str) -> None:
    assert format_usd(None if amount is None else Decimal(amount)) == text


@pytest.mark.parametrize(
    ("ns", "text"), [(0, "0.00"), (40_000_000_000, "0.0111"), (NS_PER_HOUR * 25 // 2, "12.50")]
)
def test_hours_keep_three_significant_digits(ns: int, text: str) -> None:
    assert format_hours(ns) == text


@pytest.mark.parametrize(
    ("frac", "text"),
    [(None, "n/a"), ("-0.00001", "0.0 %"), ("0.755", "75.5 %"), ("-15.5", "-1,550.0 %"), ("1", "100.0 %")],
)
def test_percentages_have_no_minus_zero(frac: str | None, text: str) -> None:
    assert format_percent(None if frac is None else Decimal(frac)) == text


def test_table_says_costs_parts_groups_and_margin() -> None:
    text = table_text(some_report())
    for line in (
        "useful                 0.00833   30.0 %    $0.03",
        "failed and retried     0.00278   10.0 %    $0.01",
        "loading and preparing  0.00208    7.5 %  $0.0075",
        "total                   0.0278  100.0 %    $0.10",
        "gross margin                93.3 %     96.8 %                 95.5 %",
        "832x480x81 50 steps       3  10.00  10.00  10.00",
    ):
        assert line in text.splitlines()
    assert "at 70.0 % utilization" in text


def test_table_has_no_control_characters_and_cuts_no_row() -> None:
    text = table_text(some_report(), width=20)
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "\u2026" not in text
    assert text == table_text(some_report(), width=500)
    assert "?[31mred?[0m?[bold]xxx" in text


def test_table_fits_a_terminal_that_knows_ascii_only() -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    render_table(some_report(), Console(file=stream))
    stream.flush()
    assert b"GPU time" in written.getvalue()


def test_without_a_gpu_price_there_are_hours_and_one_hint() -> None:
    text = table_text(some_report(prices=Prices(), by=None))
    assert "total                   0.0278  100.0 %   n/a" in text.splitlines()
    assert text.count("--gpu-price") == 1
    assert "$" not in text


def refuse_constant(name: str) -> None:
    pytest.fail(f"not JSON: {name}")


@pytest.mark.parametrize(
    "prices", [Prices(), ALL_PRICES, Prices(gpu_per_hour=Decimal(0), per_second=Decimal(0))]
)
@pytest.mark.parametrize("empty", [True, False])
def test_json_and_table_have_no_nan_and_no_minus_zero(prices: Prices, empty: bool) -> None:
    report = empty_report(prices) if empty else some_report(prices=prices)
    facts = json.loads(render_json(report), parse_constant=refuse_constant)
    assert not [leaf for leaf in leaves(facts) if str(leaf).lower().startswith(("-0", "nan", "inf"))]
    text = table_text(report)
    assert "nan" not in text.lower()
    assert "-0.0" not in text
    assert "-$0" not in text
    assert facts["total"]["gpu_s"]["total"] == (0.0 if empty else 100.0)


def test_json_money_is_exact_text_and_not_available_is_null() -> None:
    facts = json.loads(render_json(some_report()))
    assert facts["schema"]["money"] == "USD as decimal text"
    assert facts["total"]["cost_usd"] == {
        "useful": "0.03",
        "wasted": "0.01",
        "load": "0.0075",
        "padding": "0",
        "idle": "0.0525",
        "total": "0.1",
    }
    assert facts["total"]["value_usd"] == "1.5"
    assert facts["prices"]["per_second_usd"] is None
    assert [line["name"] for line in facts["groups"]].count(NASTY) == 1


def test_json_and_csv_say_the_same() -> None:
    report = some_report()
    rows = list(csv.DictReader(io.StringIO(render_csv(report))))
    groups = json.loads(render_json(report))["groups"]
    assert [row["name"] for row in rows] == [group["name"] for group in groups]
    for row, group in zip(rows, groups, strict=True):
        assert row["cost_usd_total"] == group["cost_usd"]["total"]
        assert row["full_load_margin_frac"] == (str(group["full_load"]["margin_frac"] or ""))
        assert int(row["videos"]) == group["videos"]


def test_csv_of_an_empty_ledger_is_a_total_with_the_same_columns() -> None:
    empty = list(csv.reader(io.StringIO(render_csv(empty_report(Prices())))))
    full = list(csv.reader(io.StringIO(render_csv(some_report()))))
    assert empty[0] == full[0]
    assert len(empty) == 2
    assert empty[1][0] == "total"
