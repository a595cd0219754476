from __future__ import annotations

import pytest

from pipeline.memory.caps import batch_cap, measured_cap, still_rising


@pytest.mark.parametrize(
    ("tokens", "cap"),
    [
        (1, 8),
        (320, 8),
        (625, 8),
        (1_249, 8),
        (1_250, 4),
        (2_499, 4),
        (2_500, 2),
        (4_999, 2),
        (5_000, 1),
        (31_248, 1),
    ],
)
def test_the_cap_is_the_smallest_power_of_two_that_fills_the_card(tokens: int, cap: int) -> None:
    assert batch_cap(tokens) == cap


@pytest.mark.parametrize(
    ("clip_step_s", "rises", "cap"),
    [
        ([1.0], True, 1),
        ([1.0, 1.2], False, 1),
        ([1.0, 0.99], False, 1),
        ([1.0, 0.97], True, 2),
        ([1.0, 0.5, 0.4, 0.399], False, 4),
        ([1.0, 0.5, 0.49, 0.475], True, 8),
        ([1.0, 0.97, 0.941, 0.92], False, 4),
        ([1.0, 0.5, 0.6], False, 2),
    ],
)
def test_the_measured_cap_is_the_smallest_size_that_comes_near_the_best(
    clip_step_s: list[float], rises: bool, cap: int
) -> None:
    by_size = {2**power: seconds for power, seconds in enumerate(clip_step_s)}
    assert still_rising(by_size) == rises
    assert measured_cap(by_size) == cap
