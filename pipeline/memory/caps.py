"""How many clips are worth rendering at once. No torch here."""

from __future__ import annotations

# Measured on one H200: above about 5,000 tokens in a forward a larger batch gains nothing (5,070 tokens a
# clip: 131 ms alone, 127 ms each in a batch of 8); at 320 tokens a batch of 8 is four times as fast.
FULL_CARD_TOKENS = 5_000
LARGEST_BATCH = 8


def batch_cap(tokens_per_clip: int) -> int:
    """The smallest power of two whose tokens fill the card, at most LARGEST_BATCH."""
    cap = 1
    while cap < LARGEST_BATCH and cap * tokens_per_clip < FULL_CARD_TOKENS:
        cap *= 2
    return cap
