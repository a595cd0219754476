"""Counts in messages: one of a thing is not called several."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from manifests.wording import counted
from tests.run_cases import ROOT, planned, rows_of

# What people read of most often. `7 jobs are` stands where one of them has words of its own.
_COUNTED = re.compile(r"""\{[^{}'"]*\} (more )?(clips|rows|jobs|buckets|pairs|steps|prompts)\b(?! of| are)""")


@pytest.mark.parametrize(
    ("count", "one", "many", "said"),
    [(1, "clip", None, "1 clip"), (2, "clip", None, "2 clips"), (0, "batch", "batches", "0 batches")],
)
def test_a_count_is_followed_by_one_or_many(count: int, one: str, many: str | None, said: str) -> None:
    assert counted(count, one, many) == said


def test_a_bucket_of_one_step_is_called_so_in_a_plan(tmp_path: Path) -> None:
    (bucket,) = planned(tmp_path, rows_of("a", steps=1)).plan.buckets
    assert bucket.label.endswith(" 1 step")


@pytest.mark.parametrize("room", ["jobs", "manifests", "cost"])
def test_no_message_of_a_room_counts_by_itself(room: str) -> None:
    found = [
        f"{path.name}:{number}: {text.strip()}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if _COUNTED.search(text)
    ]
    assert found == []
