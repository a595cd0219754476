from __future__ import annotations

import pytest

from pipeline.memory.caps import batch_cap


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
