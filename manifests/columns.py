"""From whatever type a writer chose to what a column means, a whole column at a time.

pandas turns integers with a null into floats, DuckDB sums to HUGEINT (float64 in Parquet), polars writes
large strings, a CSV made of text has every number as text: all of these are read, and none may lose digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from manifests.arrays import Floats, Ints, Mask, phrase
from manifests.errors import ManifestError
from manifests.rows import Rows

INT64_MAX = 2**63 - 1
PRICE = pa.decimal128(18, 6)


@dataclass(frozen=True, kw_only=True)
class Given:
    """A numeric column. given: rows that have a value; the others hold 0."""

    values: npt.NDArray[Any]
    given: Mask

    def or_default(self, default: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.where(self.given, self.values, default)


# ---- types ------------------------------------------------------------------------------------------


def check_type(name: str, type: pa.DataType, *, kind: str, file: str) -> None:
    """Raises ManifestError when a column of this type can never hold what its kind needs."""
    inner = _inner(type)
    if not any(accepts(inner) for accepts in _ACCEPTED[kind]):
        raise ManifestError(
            f"column `{name}` of `{file}` cannot be read as {_MEANS[kind]}: its type is {type}",
            hint=f"write it as {_MEANS[kind]}",
        )


def _inner(type: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(type):
        return _inner(type.value_type)
    if isinstance(type, pa.BaseExtensionType):
        is_uuid = type.extension_name == "arrow.uuid"
        return pa.string() if is_uuid else _inner(type.storage_type)
    return type


def _is_text(type: pa.DataType) -> bool:
    return (
        pa.types.is_string(type)
        or pa.types.is_large_string(type)
        or pa.types.is_string_view(type)
        or _is_bytes(type)
    )


def _is_bytes(type: pa.DataType) -> bool:
    """Text without its annotation, as some writers leave it."""
    return pa.types.is_binary(type) or pa.types.is_large_binary(type) or pa.types.is_binary_view(type)


_NUMBER = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
_ACCEPTED: dict[str, Sequence[Callable[[pa.DataType], bool]]] = {
    "text": (pa.types.is_null, _is_text),
    "id": (pa.types.is_null, _is_text, pa.types.is_integer, pa.types.is_floating),
    "whole": (pa.types.is_null, _is_text, *_NUMBER),
    "real": (pa.types.is_null, _is_text, *_NUMBER),
    "rate": (pa.types.is_null, _is_text, *_NUMBER),
    "price": (pa.types.is_null, _is_text, *_NUMBER),
    "duration": (pa.types.is_null, _is_text, *_NUMBER, pa.types.is_duration),
    "reserved": (lambda type: True,),
    "tag": (pa.types.is_null, _is_text, *_NUMBER, pa.types.is_boolean, pa.types.is_temporal),
}
_MEANS = {
    "text": "text",
    "id": "an id (text or a whole number)",
    "whole": "whole numbers",
    "real": "numbers",
    "rate": "a frame rate (a number or `24000/1001`)",
    "price": "an amount of money",
    "duration": "seconds",
    "tag": "a tag (text, a number, a date)",
}


# ---- text -------------------------------------------------------------------------------------------


def texts(rows: Rows, name: str) -> pa.Array:
    """A column as strings with nulls; rows that are not valid UTF-8 are rejected and null."""
    column = rows.column(name)
    if column is None or pa.types.is_null(column.type):
        return pa.nulls(len(rows), pa.string())
    if not _is_text(column.type):
        return _scalar_texts(column)
    raw = column.cast(pa.binary())
    try:
        rows.written[name] = raw.cast(pa.string())
    except pa.ArrowInvalid:
        bad = np.array([not _is_utf8(value) for value in raw.to_pylist()])
        rows.reject(bad, name, "not valid UTF-8")
        valid = pc.if_else(pa.array(bad), pa.scalar(None, pa.binary()), raw)
        rows.written[name] = valid.cast(pa.string())
    return rows.written[name]


def _is_utf8(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False


def _scalar_texts(column: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        # As UTC, because a zone's rules need a database that slim images lack.
        utc = column.cast(pa.int64()).cast(pa.timestamp(column.type.unit)).cast(pa.string())
        return pc.binary_join_element_wise(utc, "Z", "")
    return column.cast(pa.string())


def id_texts(rows: Rows) -> pa.Array:
    """The `id` column in Unicode's composed form (NFC), null where a row has none."""
    column = rows.column("id")
    if column is not None and not _is_text(column.type) and not pa.types.is_null(column.type):
        numbers = whole_numbers(rows, "id", low=-INT64_MAX, high=INT64_MAX, valid="a whole number or text")
        return pa.array(numbers.values, mask=~numbers.given).cast(pa.string())
    ids = texts(rows, "id")
    ascii = pc.fill_null(pc.string_is_ascii(ids), True)
    return ids if pc.all(ascii).as_py() is not False else pc.utf8_normalize(ids, form="NFC")


# ---- numbers ----------------------------------------------------------------------------------------


def whole_numbers(rows: Rows, name: str, *, low: int, high: int, valid: str) -> Given:
    """An integer column: low <= value <= high (within int64), other rows rejected saying `valid`."""
    column = rows.column(name)
    if column is None or pa.types.is_null(column.type):
        return _absent(len(rows))
    given = _given(column)
    if pa.types.is_integer(column.type):
        values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
        values, bad = _narrowed(values)
    elif pa.types.is_floating(column.type):
        exact = 2 ** {16: 11, 32: 24, 64: 53}[column.type.bit_width]
        floats = pc.fill_null(column.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
        # At 2^53 and above a float64 may stand for more than one whole number.
        lossy = np.isfinite(floats) & (np.abs(floats) >= exact)
        reason = (
            f"too large for a {column.type} column, digits may be lost; write the column as int64 or text"
        )
        rows.reject(given & lossy, name, reason)
        bad = ~np.isfinite(floats) | (floats != np.floor(floats)) | lossy
        values = np.where(bad, 0, floats).astype(np.int64)
    else:
        values, bad = _whole_from_text(_number_texts(rows, name, column))
    bad = given & (bad | (values < low) | (values > high))
    rows.reject(bad, name, f"must be {valid}")
    return _written(rows, name, values, given & ~bad)


def _written(rows: Rows, name: str, values: npt.NDArray[Any], given: Mask) -> Given:
    rows.written[name] = pa.array(values, mask=~given)
    return Given(values=values, given=given)


def _narrowed(values: npt.NDArray[Any]) -> tuple[Ints, Mask]:
    if values.dtype != np.uint64:
        return values.astype(np.int64), np.zeros(len(values), np.bool_)
    bad = values > np.uint64(INT64_MAX)
    return np.where(bad, np.uint64(0), values).astype(np.int64), bad


def _number_texts(rows: Rows, name: str, column: pa.Array) -> pa.Array:
    if not _is_text(column.type):
        # Arrow writes a zero of many decimals as 0E-10.
        return pc.replace_substring_regex(column.cast(pa.string()), pattern="^0E.*$", replacement="0")
    return pc.utf8_trim_whitespace(texts(rows, name))


def _whole_from_text(numbers: pa.Array) -> tuple[Ints, Mask]:
    """Exact: by way of decimals, since 19 digits may or may not fit into int64."""
    matched = pc.match_substring_regex(numbers, r"^[+-]?[0-9]+(\.0*)?$")
    digits = pc.replace_substring_regex(numbers, pattern=r"^\+?(-?)0*([0-9]+?)(\.0*)?$", replacement=r"\1\2")
    usable = pc.fill_null(pc.and_(matched, pc.less_equal(pc.binary_length(digits), 20)), False)
    decimals = pc.if_else(usable, digits, "0").cast(pa.decimal128(20, 0))
    fits = pc.and_(
        pc.less_equal(decimals, pa.scalar(Decimal(INT64_MAX), pa.decimal128(20, 0))),
        pc.greater_equal(decimals, pa.scalar(Decimal(-INT64_MAX), pa.decimal128(20, 0))),
    )
    zero = pa.scalar(Decimal(0), pa.decimal128(20, 0))
    values = pc.if_else(fits, decimals, zero).cast(pa.int64())
    bad = pc.invert(pc.and_(usable, fits))
    return values.to_numpy(zero_copy_only=False), bad.to_numpy(zero_copy_only=False)


def real_numbers(rows: Rows, name: str, *, accepts: Callable[[Floats], Mask], valid: str) -> Given:
    """A float column; rows whose value `accepts` does not take are rejected saying `valid`."""
    column = rows.column(name)
    if column is None or pa.types.is_null(column.type):
        return _absent(len(rows), np.float64)
    given = _given(column)
    values = _floats(rows, name, column)
    bad = given & ~(np.isfinite(values) & accepts(values))
    rows.reject(bad, name, f"must be {valid}")
    # Adding 0.0 makes a negative zero a zero: both ask for the same.
    return _written(rows, name, np.where(bad, 0.0, values) + 0.0, given & ~bad)


_REAL = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?$"


def _floats(rows: Rows, name: str, column: pa.Array) -> Floats:
    """float64, 0 for null and NaN for text that is no number."""
    if _is_text(column.type):
        numbers = _number_texts(rows, name, column)
        matched = pc.match_substring_regex(numbers, _REAL)
        column = pc.if_else(matched, pc.utf8_ltrim(numbers, characters="+"), "nan")
    elif pa.types.is_float32(column.type) or pa.types.is_decimal(column.type):
        column = column.cast(pa.string())  # 7.1 in float32 means 7.1, not 7.0999999
    return pc.fill_null(column.cast(pa.float64(), safe=False), 0.0).to_numpy(zero_copy_only=False)


def _given(column: pa.Array) -> Mask:
    return column.is_valid().to_numpy(zero_copy_only=False)


def _absent(count: int, dtype: type[np.generic] = np.int64) -> Given:
    return Given(values=np.zeros(count, dtype), given=np.zeros(count, np.bool_))


# ---- seconds, rates, money --------------------------------------------------------------------------

_NS_PER_TICK = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_LONGEST_S = 10**6  # no model comes near; what is longer is cut to this, so that nanoseconds fit into int64


def durations(rows: Rows) -> Given:
    """The `duration` column in whole nanoseconds, so that 0.58 s is 0.58 s and not a bit less."""
    column = rows.column("duration")
    valid = "a number of seconds above 0"
    if column is None or not pa.types.is_duration(column.type):
        seconds = real_numbers(rows, "duration", accepts=lambda values: values > 0, valid=valid)
        nanoseconds = np.rint(np.minimum(seconds.values, _LONGEST_S) * 1e9).astype(np.int64)
        if column is None:
            return Given(values=nanoseconds, given=seconds.given)
        return _written(rows, "duration", nanoseconds, seconds.given)
    given = _given(column)
    ticks = pc.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    rows.reject(given & (ticks <= 0), "duration", f"must be {valid}")
    ns_per_tick = _NS_PER_TICK[column.type.unit]
    shortened = np.clip(ticks, 0, _LONGEST_S * (10**9 // ns_per_tick))
    return _written(rows, "duration", shortened * ns_per_tick, given & (ticks > 0))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Frames per second as exact fractions. given: rows that have one; the others hold 0/1."""

    num: Ints
    den: Ints
    given: Mask


def rates(rows: Rows) -> Rates:
    """The `fps` column; each distinct value is parsed once."""
    column = rows.column("fps")
    if column is None or pa.types.is_null(column.type):
        absent = _absent(len(rows))
        return Rates(num=absent.values, den=absent.values + 1, given=absent.given)
    given = _given(column)
    written = texts(rows, "fps") if _is_text(column.type) else column.cast(pa.string())
    codes = written.dictionary_encode()
    parsed = [_rate(value) for value in codes.dictionary.to_pylist()]
    numbers = [rate or Fraction(0) for rate in parsed] + [Fraction(0)]
    index = pc.fill_null(codes.indices, len(parsed)).to_numpy(zero_copy_only=False)
    num = np.array([rate.numerator for rate in numbers], np.int64)[index]
    den = np.array([rate.denominator for rate in numbers], np.int64)[index]
    bad = given & (num == 0)
    rows.reject(bad, "fps", "must be 1 to 240 frames per second, as a number or a fraction like 24000/1001")
    rows.written["fps"] = pc.if_else(
        pa.array(given & ~bad), phrase(num, "/", den), pa.scalar(None, pa.string())
    )
    return Rates(num=num, den=den, given=given & ~bad)


# ffmpeg keeps frame rates exactly up to this numerator and denominator.
_LARGEST_TERM = 1_001_000
_NTSC = [Fraction(base * 1000, 1001) for base in (24, 30, 48, 60, 120, 240)]


def _rate(text: str) -> Fraction | None:
    """None when text is no frame rate from 1 to 240."""
    text = text.strip()
    if re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", text):
        num, den = map(int, text.split("/"))
        rate = Fraction(num, den) if den else Fraction(0)
    elif re.fullmatch(_REAL, text):
        rate = _as_meant(Fraction(text))
    else:
        return None
    fits = 1 <= rate <= 240 and max(rate.numerator, rate.denominator) <= _LARGEST_TERM
    return rate if fits else None


def _as_meant(rate: Fraction) -> Fraction:
    """23.976 and 23.98 are how people write 24000/1001; a float's tail of noise is cut."""
    for exact in _NTSC:
        if rate != round(rate) and abs(rate - exact) < Fraction(5, 1000):
            return exact
    return rate.limit_denominator(4000)


def prices(rows: Rows) -> pa.Array:
    """The `price` column as decimal128(18, 6) with nulls. Floats are rounded to 6 places; text and
    decimals with more are rejected, so that no written digit of money is lost."""
    column = rows.column("price")
    if column is None or pa.types.is_null(column.type):
        return pa.nulls(len(rows), PRICE)
    given = _given(column)
    if pa.types.is_floating(column.type):
        floats = _floats(rows, "price", column).round(6)
        usable = (floats >= 0) & (floats < 1e12)
        amounts = pa.array(np.where(usable, floats, 0.0))
    else:
        texts = _number_texts(rows, "price", column)
        shortest = pc.replace_substring_regex(texts, pattern=r"\.([0-9]*?)0*$", replacement=r".\1")
        amounts = pc.utf8_rtrim(shortest, characters=".")
        matched = pc.match_substring_regex(amounts, r"^[0-9]{1,12}(\.[0-9]{1,6})?$")
        usable = pc.fill_null(matched, False).to_numpy(zero_copy_only=False)
    bad = given & ~usable
    rows.reject(bad, "price", "must be an amount of at least 0 with at most 6 decimals")
    return pc.if_else(pa.array(given & ~bad), amounts, pa.scalar(None, amounts.type)).cast(PRICE)
