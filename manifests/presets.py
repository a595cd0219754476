"""The presets a job may ask for. What each does to the numbers is the engine's business."""

from __future__ import annotations

from collections.abc import Mapping

EXACT, FAST, TURBO = "exact", "fast", "turbo"

# By name, what it says of itself. After the three that people use come the switches that `fast` is made of;
# the last one is no part of it, as the clips that are judged most have too few tokens for it.
PRESETS: Mapping[str, str] = {
    EXACT: "the reference's numbers, up to rounding",
    FAST: "all approximations that pass the quality gate together",
    TURBO: "a few-step checkpoint or LoRA, in fp8 where the card has it",
    "fp8": "8-bit matrix products and self-attention",
    "step-cache": "steps whose outcome can be told from the last ones are not computed",
    "guidance-reuse": "late steps reuse what guidance added before",
    "guidance-interval": "only steps in the middle of the schedule are guided",
    "sparse-attention": "in late steps of long clips, self-attention leaves out most pairs of tokens",
}
