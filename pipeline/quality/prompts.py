"""What clips are compared on: captions of a known truth for the built-in model, varied prompts for others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pipeline.models.tiny.captions import Case, evaluation_cases

_CAPTIONS = 200  # of `evaluation_cases`; further clips are of the same captions with other noise
_FIRST_SEED = 500_000
DEFAULT_CAPTION_CLIPS = 600
_OVERRIDES_FILE = "vgbatch.json"
_BUILTIN = Path(__file__).parent.parent / "models" / "tiny" / _OVERRIDES_FILE

# Each strains something else: faces, hands, text, water, crowds, the dark, quick and slow motion, rest.
_PROMPTS = (
    "A close-up of an elderly fisherman laughing, wrinkles around his eyes, soft morning light",
    "Two hands knead bread dough on a floured wooden table, flour dust in a beam of sunlight",
    "A neon sign that reads OPEN flickers above a rainy street at night, reflections in the puddles",
    "Waves break on black rocks, spray hangs in the air, slow motion, overcast sky",
    "A red vintage car races along a coastal road, the camera follows from the side, motion blur",
    "A busy market square seen from above, dozens of people walk between colourful stalls",
    "A lighthouse stands on a cliff under a starry sky, the Milky Way turns slowly, nearly dark",
    "A paper boat drifts down a small stream through fallen autumn leaves, seen from close to the water",
    "A white cat sits perfectly still on a windowsill, only its tail moves, snow falls outside",
    "A dancer in a flowing yellow dress spins on an empty stage, a single spotlight, dust in the air",
    "An old steam train crosses a stone viaduct, thick smoke, a wide shot with mountains behind it",
    "A watercolour animation of a fox that runs through tall grass, soft edges, pastel colours",
)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """truth: what a clip of it must show, where that is known."""

    id: str
    text: str
    seed: int
    truth: Case | None = None


def held_out_captions(num_clips: int) -> list[Prompt]:
    """Captions that the built-in model was never trained on, with the noise of its model card's figures."""
    cases = evaluation_cases(_CAPTIONS)
    return [
        Prompt(
            id=f"caption-{index:04}",
            text=cases[index % _CAPTIONS].caption,
            seed=_FIRST_SEED + index,
            truth=cases[index % _CAPTIONS],
        )
        for index in range(num_clips)
    ]


def varied_prompts(num_clips: int | None) -> list[Prompt]:
    """Ours, each once unless more clips are asked for; then again with other noise."""
    return [
        Prompt(id=f"prompt-{index:02}", text=_PROMPTS[index % len(_PROMPTS)], seed=_FIRST_SEED + index)
        for index in range(len(_PROMPTS) if num_clips is None else num_clips)
    ]


def understands_captions(folder: Path) -> bool:
    """Whether a checkpoint is the built-in model, as shipped or trained anew: it says so by its name."""
    try:
        return bool(_display_name(folder / _OVERRIDES_FILE) == _display_name(_BUILTIN))
    except OSError:
        return False


def _display_name(overrides: Path) -> object:
    return json.loads(overrides.read_text(encoding="utf-8")).get("display_name")
