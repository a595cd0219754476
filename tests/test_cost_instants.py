from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from cost.instants import parse_instant, parse_timezone
from manifests.errors import UsageError

NEW_YORK = ZoneInfo("America/New_York")


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("2026-11-01", datetime(2026, 11, 1, 4, tzinfo=UTC)),
        ("2026-11-02", datetime(2026, 11, 2, 5, tzinfo=UTC)),
        ("2026-11-01T00:15", datetime(2026, 11, 1, 4, 15, tzinfo=UTC)),
        ("2026-11-01T01:30", datetime(2026, 11, 1, 5, 30, tzinfo=UTC)),  # the first of two
        ("2026-11-01T06:30Z", datetime(2026, 11, 1, 6, 30, tzinfo=UTC)),
        ("2026-11-01 06:30:01+09:00", datetime(2026, 10, 31, 21, 30, 1, tzinfo=UTC)),
        ("2026-03-08T02:30", datetime(2026, 3, 8, 7, 30, tzinfo=UTC)),  # does not exist: skipped that night
    ],
)
def test_dates_and_bare_times_are_read_in_the_zone(text: str, instant: datetime) -> None:
    assert parse_instant(text, flag="--since", tz=NEW_YORK) == instant


@pytest.mark.parametrize(
    "text", ["", "yesterday", "2026-13-01", "2026-02-30", "01.11.2026", "2026-11-01T25:00", "0001-01-01"]
)
def test_unusable_instant_names_flag_and_value(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_instant(text, flag="--since", tz=ZoneInfo("Asia/Tokyo"))
    assert "--since" in caught.value.message
    assert repr(text) in caught.value.message


@pytest.mark.parametrize("text", ["", "Europe", "../etc/passwd", "/etc/localtime", "Mars/Olympus", "a\0b"])
def test_unusable_zone_names_flag_and_value(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_timezone(text, flag="--tz")
    assert "--tz" in caught.value.message
    assert repr(text) in caught.value.message


def test_misspelt_zone_gets_a_near_miss() -> None:
    with pytest.raises(UsageError) as caught:
        parse_timezone("Europe/Berln", flag="--tz")
    assert "Europe/Berlin" in str(caught.value.hint)
