"""Time zones and instants as a user writes them."""

from __future__ import annotations

from datetime import UTC, datetime
from difflib import get_close_matches
from zoneinfo import ZoneInfo, available_timezones

from manifests.errors import UsageError


def parse_timezone(text: str, *, flag: str) -> ZoneInfo:
    """An IANA zone such as `Europe/Berlin`. UsageError names the flag, the value and near misses."""
    try:
        return ZoneInfo(text)
    except (LookupError, ValueError, OSError):  # unknown, no valid key, a folder of zones
        near = get_close_matches(text, available_timezones(), n=3, cutoff=0.6)
        hint = (
            f"did you mean {' or '.join(near)}?" if near else "give an IANA name such as UTC or Europe/Berlin"
        )
        raise UsageError(f"{flag} is no time zone: {text!r}", hint=hint) from None


def parse_instant(text: str, *, flag: str, tz: ZoneInfo) -> datetime:
    """A UTC instant from an ISO date (its midnight in tz) or date and time (in tz unless it has an offset).

    A time that a clock change repeats is its first occurrence, one that it skips is read with the offset
    before the change. UsageError names the flag and the value.
    """
    try:
        written = datetime.fromisoformat(text.strip())
        local = written if written.tzinfo else written.replace(tzinfo=tz)
        return local.astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{flag} is neither a date nor an instant: {text!r}",
            hint="give an ISO date such as 2026-11-01, or an instant such as 2026-11-01T05:30Z",
        ) from None
