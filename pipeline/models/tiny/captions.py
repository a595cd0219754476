"""Describes scenes in varied words: many templates, synonyms, optional parts. No torch here.

Training and evaluation share their words but no template: HELD_OUT_TEMPLATES are never trained on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from pipeline.models.tiny.scenes import (
    BACKGROUNDS,
    COLOURS,
    CORNERS,
    DIAGONALS,
    MOTIONS,
    SHAPES,
    SIZES,
    Scenes,
    sample_scenes,
)

EVALUATION_SEED = 77_001
# What a setting is chosen by must not be what it is then scored on.
CHOICE_SEED = 77_002

_SHAPE_WORDS = {
    "circle": ("circle", "circle", "disc", "ball"),
    "square": ("square", "square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
    "cross": ("cross", "cross", "plus sign"),
    "ring": ("ring", "ring", "hoop"),
    "heart": ("heart",),
}
_COLOUR_WORDS = {name: (name,) for name in BACKGROUNDS} | {
    "purple": ("purple", "purple", "violet"),
    "gray": ("gray", "grey"),
}
_SIZE_WORDS = {"small": ("small", "little"), "medium": ("",), "large": ("large", "big")}

# (finite verb, participle), so that both "it moves left" and "moving left" can be said.
_MOTION_WORDS = {
    "still": (
        ("stays still", "staying still"),
        ("does not move", "not moving"),
        ("stands still", "standing still"),
        ("is motionless", "being motionless"),
        ("rests in place", "resting in place"),
    ),
    "left": (
        ("moves left", "moving left"),
        ("moves to the left", "moving to the left"),
        ("slides left", "sliding left"),
        ("drifts to the left", "drifting to the left"),
        ("goes from right to left", "going from right to left"),
        ("travels left", "travelling left"),
    ),
    "right": (
        ("moves right", "moving right"),
        ("moves to the right", "moving to the right"),
        ("slides right", "sliding right"),
        ("drifts to the right", "drifting to the right"),
        ("goes from left to right", "going from left to right"),
        ("travels right", "travelling right"),
    ),
    "up": (
        ("moves up", "moving up"),
        ("rises", "rising"),
        ("goes upwards", "going upwards"),
        ("floats up", "floating up"),
        ("moves to the top", "moving to the top"),
    ),
    "down": (
        ("moves down", "moving down"),
        ("falls", "falling"),
        ("goes downwards", "going downwards"),
        ("sinks", "sinking"),
        ("drops to the bottom", "dropping to the bottom"),
    ),
    "diagonal": (
        ("moves diagonally to the {corner}", "moving diagonally to the {corner}"),
        ("slides diagonally towards the {corner}", "sliding diagonally towards the {corner}"),
        ("drifts to the {corner} corner", "drifting to the {corner} corner"),
        ("moves diagonally", "moving diagonally"),
    ),
    "bounce": (
        ("bounces", "bouncing"),
        ("bounces up and down", "bouncing up and down"),
        ("hops up and down", "hopping up and down"),
        ("jumps up and down", "jumping up and down"),
    ),
    "circle": (
        ("moves in a circle", "moving in a circle"),
        ("goes round in a circle", "going round in a circle"),
        ("circles around", "circling around"),
        ("travels along a circular path", "travelling along a circular path"),
    ),
    "grow": (
        ("grows", "growing"),
        ("gets bigger", "getting bigger"),
        ("becomes larger", "becoming larger"),
        ("expands", "expanding"),
    ),
    "shrink": (
        ("shrinks", "shrinking"),
        ("gets smaller", "getting smaller"),
        ("becomes smaller", "becoming smaller"),
        ("contracts", "contracting"),
    ),
    "rotate": (
        ("rotates", "rotating"),
        ("spins", "spinning"),
        ("turns around itself", "turning around itself"),
        ("rotates in place", "rotating in place"),
    ),
}
_CORNER_WORDS = dict(
    zip(
        CORNERS,
        (
            ("upper left", "top left"),
            ("upper right", "top right"),
            ("lower left", "bottom left"),
            ("lower right", "bottom right"),
        ),
        strict=True,
    )
)

_PLAIN = (
    "on a {0} background",
    "in front of a {0} background",
    "against a {0} backdrop",
    "over a {0} background",
    "with a {0} background",
)
_GRADED = (
    "on a background fading from {0} {2} to {1} {3}",
    "in front of a gradient from {0} {2} to {1} {3}",
    "on a {0} to {1} gradient",
    "against a background that goes from {0} to {1}",
)
_ENDS = (("at the top", "at the bottom"), ("on the left", "on the right"))
_COMPANIONS = (
    " with a {size} {thing} in the {corner} corner",
    " and a {size} {thing} in the {corner} corner",
    " next to a {size} still {thing} at the {corner}",
    ", with a {size} {thing} at the {corner}",
)

# object: "a big red ball"; bare: without article; moves, moving: the motion; other: the companion or nothing;
# where: the background with a space before it, or nothing; shape, colour: alone.
TEMPLATES = (
    "{object} {moves}{other}{where}",
    "{object} {moving}{other}{where}",
    "{object} {moves}{where}{other}",
    "{object} is {moving}{where}{other}",
    "{object} that {moves}{other}{where}",
    "{object}{where}, {moving}{other}",
    "{object}{where} {moves}{other}",
    "a video of {object} {moving}{other}{where}",
    "a video of {object} that {moves}{where}{other}",
    "a short clip: {object} {moves}{other}{where}",
    "an animation of {object}{where}{other}, {moving}",
    "{bare}, {moving}{other}{where}",
    "{bare} {moving}{where}{other}",
    "{moving}: {object}{other}{where}",
    "{where_first}{object} {moves}{other}",
    "{where_first}{object} is {moving}{other}",
    "{where_first}there is {object} {moving}{other}",
    "there is {object}{where}{other}, it {moves}",
    "the {shape} is {colour} and {moves}{other}{where}",
    "the {bare} {moves}{where}{other}",
    "we see how {object} {moves}{where}{other}",
    "watch the {bare} {moving}{other}{where}",
    "{object} which {moves}{where}{other}",
    "in this video {object} {moves}{other}{where}",
)
HELD_OUT_TEMPLATES = (
    "a clip in which {object} {moves}{other}{where}",
    "{where_first}we see {object} that is {moving}{other}",
    "a short video: {object}{where}{other} {moves}",
    "watch how {object} {moves}{where}{other}",
    "the {shape}, which is {colour}, {moves}{where}{other}",
    "{object}{other}{where}: it is {moving}",
    "an animation in which {object} is {moving}{where}{other}",
    "there is a video of the {bare} {moving}{where}{other}",
)
_FILLERS = (
    "slowly",
    "smoothly",
    "in a simple style",
    "seen from the front",
    "in this scene",
    "bright",
    "cinematic",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One caption of the evaluation, and what a clip of it must show."""

    caption: str
    colour: str
    shape: str
    motion: str


def evaluation_cases(num_cases: int = 200, *, seed: int = EVALUATION_SEED) -> list[Case]:
    """Always the same captions of 64x64 scenes: templates and combinations that training never shows."""
    rng = np.random.default_rng(seed)
    scenes = sample_scenes(rng, num_cases, width=64, height=64, held_out=True)
    words = Random(seed)
    return [
        Case(caption=caption, colour=colour, shape=shape, motion=motion)
        for caption, (colour, shape, motion) in zip(
            (describe(scenes, index, words, HELD_OUT_TEMPLATES) for index in range(num_cases)),
            map(scenes.truth, range(num_cases)),
            strict=True,
        )
    ]


def describe(scenes: Scenes, index: int, words: Random, templates: tuple[str, ...] = TEMPLATES) -> str:
    """One of many true captions of one scene. It always names the main object's colour, shape and motion."""
    shape = words.choice(_SHAPE_WORDS[SHAPES[scenes.shape[index]]])
    colour = words.choice(_COLOUR_WORDS[COLOURS[scenes.colour[index]]])
    size = _size(scenes, index, words)
    moves, moving = _motion(scenes, index, words)
    bare = f"{size} {colour} {shape}".strip()
    where = _background(scenes, index, words) if words.random() < 0.75 else ""
    template = words.choice(templates)
    return template.format(
        object=f"{_article(bare)} {bare}",
        bare=bare,
        shape=shape,
        colour=colour,
        moves=moves,
        moving=moving,
        other=_companion(scenes, index, words),
        where=f" {where}" if where else "",
        where_first=f"{where}, " if where else "",
    )


def varied(caption: str, words: Random) -> str:
    """The caption, now and then with a phrase that says nothing of the scene, so that it gets ignored."""
    draw = words.random()
    if draw > 0.15:
        return caption
    filler = words.choice(_FILLERS)
    return f"{caption}, {filler}" if draw < 0.1 else f"{filler}, {caption}"


def vocabulary() -> list[str]:
    """Every word that a caption can have, sorted."""
    texts = [*TEMPLATES, *HELD_OUT_TEMPLATES, *_FILLERS, *_PLAIN, *_GRADED, *_COMPANIONS, "a an"]
    texts += [text for column in _ENDS for text in column]
    for table in (_SHAPE_WORDS, _COLOUR_WORDS, _SIZE_WORDS, _CORNER_WORDS):
        texts += [text for choices in table.values() for text in choices]
    texts += [text for choices in _MOTION_WORDS.values() for pair in choices for text in pair]
    return sorted(set(_words(texts)) | {"tiny"})


def _words(texts: list[str]) -> Iterator[str]:
    for text in texts:
        yield from re.findall(r"[a-z]+", re.sub(r"\{\w+\}", " ", text))


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def _size(scenes: Scenes, index: int, words: Random) -> str:
    if MOTIONS[scenes.motion[index]] in ("grow", "shrink") or words.random() < 0.4:
        return ""
    return words.choice(_SIZE_WORDS[SIZES[scenes.size[index]]])


def _motion(scenes: Scenes, index: int, words: Random) -> tuple[str, str]:
    pair = words.choice(_MOTION_WORDS[MOTIONS[scenes.motion[index]]])
    corner = words.choice(_CORNER_WORDS[DIAGONALS[scenes.direction[index]]])
    finite, participle = (phrase.replace("{corner}", corner) for phrase in pair)
    return finite, participle


def _background(scenes: Scenes, index: int, words: Random) -> str:
    start, end = (words.choice(_COLOUR_WORDS[BACKGROUNDS[which]]) for which in scenes.background[index])
    if scenes.background[index, 0] == scenes.background[index, 1]:
        phrase = words.choice(_PLAIN).format(start)
        return phrase.replace(" a orange", " an orange")
    phrase = words.choice(_GRADED).format(start, end, *_ENDS[scenes.axis[index]])
    return phrase.replace(" a orange", " an orange")


def _companion(scenes: Scenes, index: int, words: Random) -> str:
    if not scenes.has_companion[index]:
        return ""
    colour = words.choice(_COLOUR_WORDS[COLOURS[scenes.companion_colour[index]]])
    shape = words.choice(_SHAPE_WORDS[SHAPES[scenes.companion_shape[index]]])
    corner = words.choice(_CORNER_WORDS[CORNERS[scenes.companion_corner[index]]])
    phrase = words.choice(_COMPANIONS)
    return phrase.format(size=words.choice(("small", "tiny")), thing=f"{colour} {shape}", corner=corner)
