"""How messages put numbers into words."""

from __future__ import annotations


def counted(count: int, one: str, many: str) -> str:
    """`1 batch`, `2 batches`."""
    return f"{count} {one if count == 1 else many}"
