"""How messages put numbers into words."""

from __future__ import annotations


def counted(count: int, one: str, many: str | None = None) -> str:
    """`1 clip`, `2 clips`. many: where an s is not enough, as of `batch`."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"
