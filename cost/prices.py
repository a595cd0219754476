"""Money and fractions as a user writes them, and the prices of one report."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from manifests.errors import UsageError

MAX_PRICE_USD = Decimal(10) ** 9
MAX_DECIMALS = 12  # money is kept to 1e-12 USD (cost.margin), so a finer price would be lost
# At most 30 digits before a two-digit exponent: a longer text is refused before Decimal ever expands it.
_NUMBER = re.compile(r"[+-]?(\d{1,30}(\.\d{0,30})?|\.\d{1,30})([eE][+-]?\d{1,2})?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What a GPU costs and what a clip earns, in USD; None: not said.

    gpu_per_hour: one device, one hour. per_video, per_second: what a delivered clip, or a second of it,
    earns where its job has no price of its own; giving both is a UsageError.
    utilization: share of the paid time that does work, in (0, 1].
    """

    gpu_per_hour: Decimal | None = None
    per_video: Decimal | None = None
    per_second: Decimal | None = None
    utilization: Decimal | None = None

    def __post_init__(self) -> None:
        if self.per_video is not None and self.per_second is not None:
            raise UsageError(
                f"two prices of a clip: {self.per_video} per video and {self.per_second} per second",
                hint="give one of `--price-per-video` and `--price-per-second`",
            )


def parse_price(text: str, *, flag: str) -> Decimal:
    """USD, 0 or more. UsageError names the flag (or other origin), the value and what would be valid."""
    price = _decimal(text)
    if price is None or not _is_price(price):
        valid = f"a number from 0 to {MAX_PRICE_USD:,} with at most {MAX_DECIMALS} decimals, like 2.5"
        raise UsageError(f"{flag} is no price: {_shown(text)}", hint=f"give {valid}")
    return abs(price)  # -0 is 0


def parse_utilization(text: str, *, flag: str) -> Decimal:
    """A fraction above 0 and at most 1. UsageError as for parse_price."""
    fraction = _decimal(text)
    if fraction is None or not 0 < fraction <= 1 or _num_decimals(fraction) > MAX_DECIMALS:
        raise UsageError(
            f"{flag} is no utilization: {_shown(text)}",
            hint="give a fraction above 0 and at most 1: 0.7 is 70 % of the paid time",
        )
    return fraction


def _decimal(text: str) -> Decimal | None:
    text = text.strip()
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def _is_price(price: Decimal) -> bool:
    return 0 <= price <= MAX_PRICE_USD and _num_decimals(price) <= MAX_DECIMALS


def _num_decimals(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int), "the pattern lets no nan or inf through"
    return -exponent


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
