"""How many clips are worth rendering at once: a rule, and what was measured. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

# Measured on one H200: above about 5,000 tokens in a forward a larger batch gains nothing (5,070 tokens a
# clip: 131 ms alone, 127 ms each in a batch of 8); at 320 tokens a batch of 8 is four times as fast.
FULL_CARD_TOKENS = 5_000
LARGEST_BATCH = 8

# What a probe tries, until throughput stops rising. On that H200 repeated medians of one size lay within 3 %.
PROBED_SIZES = (1, 2, 4, 8, 16, 32)
WORTHWHILE_GAIN = 1.03


def batch_cap(tokens_per_clip: int) -> int:
    """The smallest power of two whose tokens fill the card, at most LARGEST_BATCH."""
    cap = 1
    while cap < LARGEST_BATCH and cap * tokens_per_clip < FULL_CARD_TOKENS:
        cap *= 2
    return cap


def still_rising(clip_step_s: Mapping[int, float]) -> bool:
    """Whether the largest size tried gave enough more clips a second than the one before it.

    clip_step_s: batch size -> seconds a clip and step, sizes rising, at least one.
    """
    seconds = list(clip_step_s.values())
    return len(seconds) == 1 or seconds[-2] >= WORTHWHILE_GAIN * seconds[-1]


def measured_cap(clip_step_s: Mapping[int, float]) -> int:
    """The smallest size whose throughput comes near the best one's: what more would gain is noise.

    clip_step_s: as in still_rising.
    """
    best_s = min(clip_step_s.values())
    return next(size for size, seconds in clip_step_s.items() if seconds < WORTHWHILE_GAIN * best_s)
