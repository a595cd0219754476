from __future__ import annotations

from decimal import Decimal

import pytest

from cost.prices import Prices, parse_price, parse_utilization
from manifests.errors import UsageError

NO_NUMBERS = [
    "nan",
    "-inf",
    "inf",
    "Infinity",
    "sNaN",
    "abc",
    "2,5",
    "",
    " ",
    "$2.5",
    "2.5.1",
    "1_000",
    "２.５",
    "٢",
    "0x10",
    "1e999999999",
    "1e-999999999",
    "--1",
    "1 2",
    "9" * 1000,
]


@pytest.mark.parametrize("text", [*NO_NUMBERS, "-1", "-0.01", "1e10", "1e-13", "1000000000.01"])
def test_unusable_price_names_flag_value_and_what_is_valid(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_price(text, flag="--gpu-price")
    assert caught.value.exit_code == 2
    assert "--gpu-price" in caught.value.message
    assert text[:40] in caught.value.message
    assert len(caught.value.message) < 100
    assert "from 0 to" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "price"),
    [
        ("2.5", "2.5"),
        ("0", "0"),
        (" 3.60 ", "3.60"),
        ("+1", "1"),
        (".5", "0.5"),
        ("2.", "2"),
        ("2.5e0", "2.5"),
        ("1e-12", "0.000000000001"),
        ("1000000000", "1000000000"),
    ],
)
def test_price_is_read_exactly(text: str, price: str) -> None:
    assert parse_price(text, flag="--gpu-price") == Decimal(price)


@pytest.mark.parametrize("text", ["-0", "-0.00", "-0e5"])
def test_minus_zero_price_is_zero(text: str) -> None:
    assert not parse_price(text, flag="--gpu-price").is_signed()


@pytest.mark.parametrize("text", [*NO_NUMBERS, "0", "-0", "-0.5", "1.01", "70", "70%"])
def test_unusable_utilization_names_flag_value_and_what_is_valid(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_utilization(text, flag="--utilization")
    assert "--utilization" in caught.value.message
    assert "above 0 and at most 1" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["1", "0.7", "1e-12"])
def test_utilization_is_a_fraction(text: str) -> None:
    assert parse_utilization(text, flag="--utilization") == Decimal(text)


def test_price_per_video_and_per_second_exclude_each_other() -> None:
    with pytest.raises(UsageError, match=r"0\.5 per video and 0\.1 per second"):
        Prices(per_video=Decimal("0.5"), per_second=Decimal("0.1"))
