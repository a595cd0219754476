from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.manifest_cases import by_row, read_columns, verdicts

BIG = 4873214862074861313
LARGEST = 2**63 - 1


def column_of(folder: Path, name: str, values: Any) -> dict[int, Any]:
    return by_row(read_columns(folder, {name: values}), name)


# ---- seeds -------------------------------------------------------------------------------------------


def test_seeds_keep_every_digit_beside_a_null(tmp_path: Path) -> None:
    seeds = column_of(tmp_path, "seed", pa.array([BIG, None, LARGEST], pa.int64()))
    assert (seeds[0], seeds[2]) == (BIG, LARGEST)
    assert 0 <= seeds[1] <= LARGEST


@pytest.mark.parametrize(
    "seeds",
    [
        pa.array([0, 2**31, 2**53 + 1, LARGEST], pa.int64()),
        pa.array([0, 2**31, 2**53 + 1, LARGEST], pa.uint64()),
        pa.array(["0", "2147483648", " 9007199254740993 ", "9223372036854775807"]),
        pa.array(["+0", "0002147483648", "9007199254740993.0", "9223372036854775807.000"]),
        pa.array(["0", "2147483648", "9007199254740993", "9223372036854775807"], pa.large_string()),
        pa.array([Decimal(n) for n in (0, 2**31, 2**53 + 1, LARGEST)], pa.decimal128(38, 0)),
        pa.array([Decimal(n) for n in (0, 2**31, 2**53 + 1, LARGEST)], pa.decimal128(25, 3)),
        pa.array([Decimal(n) for n in (0, 2**31, 2**53 + 1, LARGEST)], pa.decimal256(60, 10)),
        pa.array([0, 2**31, 2**53 + 1, LARGEST], pa.int64()).dictionary_encode(),
        pa.array(["0", "2147483648", "9007199254740993", "9223372036854775807"]).dictionary_encode(),
    ],
    ids=lambda array: str(array.type),
)
def test_seeds_of_every_type_are_recorded_exactly(tmp_path: Path, seeds: pa.Array) -> None:
    assert list(column_of(tmp_path, "seed", seeds).values()) == [0, 2**31, 2**53 + 1, LARGEST]


@pytest.mark.parametrize("type", [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32()])
def test_small_integers_are_seeds(tmp_path: Path, type: pa.DataType) -> None:
    assert column_of(tmp_path, "seed", pa.array([0, 100, None], type))[1] == 100


@pytest.mark.parametrize(
    "seeds",
    [
        pa.array([-1, 5], pa.int64()),
        pa.array([2**64 - 1, 5], pa.uint64()),
        pa.array([2**63, 5], pa.uint64()),
        pa.array([1.5, 5.0]),
        pa.array([float("nan"), 5.0]),
        pa.array([float("inf"), 5.0]),
        pa.array([-1.0, 5.0]),
        pa.array(["9223372036854775808", "5"]),
        pa.array(["1" * 60, "5"]),
        pa.array(["-1", "5"]),
        pa.array(["1e3", "5"]),
        pa.array(["", "5"]),
        pa.array(["abc", "5"]),
        pa.array(["٣", "5"]),
        pa.array([Decimal("1.5"), Decimal(5)]),
        pa.array([Decimal(2**63), Decimal(5)], pa.decimal128(38, 0)),
    ],
    ids=lambda array: str(array[0]),
)
def test_a_seed_out_of_range_rejects_its_row_only(tmp_path: Path, seeds: pa.Array) -> None:
    reading = read_columns(tmp_path, {"seed": seeds})
    assert verdicts(reading) == {0: "seed", 1: "ok"}
    assert by_row(reading, "seed") == {1: 5}


@pytest.mark.parametrize(
    ("type", "digits"), [(pa.float64(), 53), (pa.float32(), 24), (pa.float16(), 11)], ids=str
)
def test_a_float_seed_that_may_have_lost_digits_is_rejected(
    tmp_path: Path, type: pa.DataType, digits: int
) -> None:
    safe, lossy = 2**digits - 1, 2**digits
    reading = read_columns(tmp_path, {"seed": pa.array(np.array([safe, lossy], type.to_pandas_dtype()))})
    assert by_row(reading, "seed") == {0: safe}
    (rejected,) = reading.rejected.to_pylist()
    assert "digits may be lost" in rejected["reason"]
    assert "int64" in rejected["reason"]


# ---- other whole numbers and reals -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "good", "bad"),
    [
        ("steps", [1, 1000], [0, 1001, -1]),
        ("num_frames", [1, 81], [0, -1, 82, 2**31]),
        ("priority", [-5, 0, 2**31 - 1], [2**31]),
        ("guidance_scale", [0.0, 1.0, 100.0], [-0.1, 100.5, float("nan"), float("inf")]),
        ("flow_shift", [0.1, 12.0], [0.0, -1.0, float("nan"), 2000.0]),
        ("fps", [1.0, 240.0], [0.0, -1.0, float("nan"), 1000.0, 0.5, 240.5, float("inf")]),
        ("duration", [0.001, 2.0], [0.0, -1.0, 1e9, float("nan"), float("inf"), 1e300]),
    ],
)
def test_ranges(tmp_path: Path, column: str, good: list[Any], bad: list[Any]) -> None:
    reading = read_columns(tmp_path, {column: good + bad})
    expected = dict.fromkeys(range(len(good)), "ok")
    assert verdicts(reading) == expected | dict.fromkeys(range(len(good), len(good) + len(bad)), column)
    assert all(row["value"] is not None and row["reason"] for row in reading.rejected.to_pylist())


@pytest.mark.parametrize(
    "values",
    [
        pa.array([7.1, None, 8.0]),
        pa.array([7.1, None, 8.0], pa.float32()),
        pa.array(["7.1", None, "8"]),
        pa.array([Decimal("7.1"), None, Decimal(8)]),
        pa.array(["+7.10", None, "0.8e1"]),
    ],
    ids=lambda array: str(array.type),
)
def test_a_real_means_what_was_written(tmp_path: Path, values: pa.Array) -> None:
    assert column_of(tmp_path, "guidance_scale", values) == {0: 7.1, 1: 5.0, 2: 8.0}


@pytest.mark.parametrize("text", ["nan", "inf", "", "seven", "1,5", "0x10", "1e"])
def test_text_that_is_no_number_is_rejected(tmp_path: Path, text: str) -> None:
    assert verdicts(read_columns(tmp_path, {"guidance_scale": [text, "1"]})) == {0: "guidance_scale", 1: "ok"}


def test_null_typed_columns_take_the_defaults(tmp_path: Path) -> None:
    names = ["id", "negative_prompt", "width", "resolution", "duration", "fps", "seed", "flow_shift", "price"]
    reading = read_columns(tmp_path, {"prompt": ["a", "b"]} | {name: pa.nulls(2) for name in names})
    bare = read_columns(tmp_path, {"prompt": ["a", "b"]})
    assert reading.jobs.drop_columns(["file"]).equals(bare.jobs.drop_columns(["file"]))


# ---- frame rates -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (23.976, "24000/1001"),
        (23.976023976, "24000/1001"),
        (23.98, "24000/1001"),
        (29.97, "30000/1001"),
        (47.952, "48000/1001"),
        (59.94, "60000/1001"),
        (119.88, "120000/1001"),
        (24.0, "24"),
        (25, "25"),
        (12.5, "25/2"),
        (1, "1"),
        (240, "240"),
        ("24000/1001", "24000/1001"),
        (" 30000/1001 ", "30000/1001"),
        ("25", "25"),
        ("23.976", "24000/1001"),
        ("50/2", "25"),
        (33.333333333, "100/3"),
    ],
)
def test_rates_are_exact(tmp_path: Path, written: Any, meant: str) -> None:
    row = read_columns(tmp_path, {"fps": [written]}).jobs.to_pylist()[0]
    assert (row["fps_num"], row["fps_den"]) == Fraction(meant).as_integer_ratio()


@pytest.mark.parametrize(
    "array",
    [
        pa.array([23.976], pa.float32()),
        pa.array([Decimal("23.976")]),
        pa.array(["23.976"]).dictionary_encode(),
        pa.array([23.976]).dictionary_encode(),
    ],
    ids=lambda array: str(array.type),
)
def test_rates_of_every_type(tmp_path: Path, array: pa.Array) -> None:
    row = read_columns(tmp_path, {"fps": array}).jobs.to_pylist()[0]
    assert (row["fps_num"], row["fps_den"]) == (24000, 1001)


@pytest.mark.parametrize("text", ["24/0", "0/1", "24/", "1/2", "fast", "", "-24", "24/1/1", "240001/1000"])
def test_text_that_is_no_rate_is_rejected(tmp_path: Path, text: str) -> None:
    assert verdicts(read_columns(tmp_path, {"fps": [text, "24"]})) == {0: "fps", 1: "ok"}


# ---- durations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "fps", "frames"),
    [
        (2.0, 8, 16),
        (0.58, 25, 15),  # 14.5 as written, 14.499999999999998 as floats
        (0.7, 25, 18),
        (0.1, 5, 1),
        (0.001, 8, 1),
        (1.0, 23.976, 24),
        (1 / 3, 24, 8),
    ],
)
def test_frames_are_seconds_times_rate_rounded_half_up(
    tmp_path: Path, seconds: float, fps: float, frames: int
) -> None:
    reading = read_columns(tmp_path, {"duration": [seconds], "fps": [float(fps)]})
    assert reading.jobs["num_frames"].to_pylist() == [frames]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([2, None], pa.int64()),
        pa.array(["2", None]),
        pa.array([Decimal("2.00"), None]),
        pa.array([2, None], pa.duration("s")),
        pa.array([2000, None], pa.duration("ms")),
        pa.array([2 * 10**6, None], pa.duration("us")),
        pa.array([2 * 10**9, None], pa.duration("ns")),
    ],
    ids=lambda array: str(array.type),
)
def test_durations_of_every_type(tmp_path: Path, array: pa.Array) -> None:
    assert column_of_frames(tmp_path, array) == [16, 17]


def column_of_frames(folder: Path, durations: pa.Array) -> list[int]:
    frames: list[int] = read_columns(folder, {"duration": durations}).jobs["num_frames"].to_pylist()
    return frames


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_duration_of_nothing_or_of_years_is_rejected(tmp_path: Path, unit: str) -> None:
    array = pa.array([0, -1, 2**62], pa.duration(unit))
    assert set(verdicts(read_columns(tmp_path, {"duration": array})).values()) == {"duration"}


def test_frames_and_duration_must_agree(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"num_frames": [16, 17, None, 16], "duration": [2.0, 2.0, 2.0, None]})
    assert verdicts(reading) == {0: "ok", 1: "duration", 2: "ok", 3: "ok"}
    assert by_row(reading, "num_frames") == {0: 16, 2: 16, 3: 16}
    reason = reading.rejected["reason"][0].as_py()
    assert "17" in reason
    assert "16 frames" in reason


# ---- prices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "price"),
    [
        (pa.array([0.07, None]), "0.07"),
        (pa.array([0.1 + 0.2, None]), "0.3"),
        (pa.array([0.1, None], pa.float32()), "0.1"),
        (pa.array([123456.789, None]), "123456.789"),
        (pa.array([5, None]), "5"),
        (pa.array(["1.5000000", None]), "1.5"),
        (pa.array(["100", None]), "100"),
        (pa.array(["10.00", None]), "10"),
        (pa.array([Decimal("0.1234560000"), None], pa.decimal128(20, 10)), "0.123456"),
        (pa.array([0, None]), "0"),
    ],
)
def test_prices_are_exact_decimals(tmp_path: Path, array: pa.Array, price: str) -> None:
    assert column_of(tmp_path, "price", array) == {0: Decimal(price), 1: None}


@pytest.mark.parametrize(
    "array",
    [
        pa.array([-1.0, 1.0]),
        pa.array([float("nan"), 1.0]),
        pa.array([float("inf"), 1.0]),
        pa.array([1e12, 1.0]),
        pa.array([-1, 1]),
        pa.array(["2,5", "1"]),
        pa.array(["$2", "1"]),
        pa.array(["0.1234567", "1"]),
        pa.array(["", "1"]),
        pa.array([Decimal("0.1234567"), Decimal(1)]),
        pa.array([Decimal("1000000000000"), Decimal(1)]),
    ],
    ids=lambda array: str(array[0]),
)
def test_a_price_that_is_no_amount_is_rejected(tmp_path: Path, array: pa.Array) -> None:
    assert verdicts(read_columns(tmp_path, {"price": array})) == {0: "price", 1: "ok"}


# ---- ids and tags ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        pa.array([7, None], pa.int64()),
        pa.array([7.0, None]),
        pa.array(["7", None], pa.large_string()),
        pa.array(["7", None]).dictionary_encode(),
        pa.array([b"7", None], pa.binary()),
    ],
    ids=lambda array: str(array.type),
)
def test_ids_of_every_type(tmp_path: Path, array: pa.Array) -> None:
    ids = column_of(tmp_path, "id", array)
    assert ids[0] == "7"
    assert ids[1].startswith("h-")


def test_text_ids_keep_leading_zeros(tmp_path: Path) -> None:
    assert column_of(tmp_path, "id", ["007", "7"]) == {0: "007", 1: "7"}


def test_tags_of_every_type_are_text(tmp_path: Path) -> None:
    noon = pa.array([1_800_000_000], pa.timestamp("s", "Europe/Berlin"))
    reading = read_columns(
        tmp_path,
        {
            "whole": pa.array([3.0]),
            "money": pa.array([Decimal("1.50")]),
            "day": pa.array([20_000], pa.date32()),
            "at": noon,
            "kind": pa.array(["x"]).dictionary_encode(),
            "raw": pa.array([b"y"], pa.binary()),
        },
    )
    tags = dict(reading.jobs["tags"][0].as_py())
    assert tags.pop("at").startswith("2027-01-15 08:00:00")
    assert tags == {"whole": "3", "money": "1.50", "day": "2024-10-04", "kind": "x", "raw": "y"}
