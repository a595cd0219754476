"""The procedural scenes, their pictures and their captions."""

from __future__ import annotations

import re
from dataclasses import fields
from random import Random

import numpy as np
import pytest
import torch

from pipeline.models.tiny import captions
from pipeline.models.tiny.captions import describe, evaluation_cases, varied, vocabulary
from pipeline.models.tiny.described import CAPTION_TOKENS, Order, draw, draw_all
from pipeline.models.tiny.networks import make_tokenizer
from pipeline.models.tiny.render import render
from pipeline.models.tiny.scenes import (
    BACKGROUND_RGB,
    COLOURS,
    MOTIONS,
    NUM_FRAMES,
    REACH,
    SHAPES,
    Scenes,
    is_held_out,
    sample_scenes,
)

SIZES = [(64, 64), (96, 64), (64, 96), (96, 96)]


def scenes_of(seed: int, num_scenes: int, width: int = 64, height: int = 64, **kind: bool) -> Scenes:
    return sample_scenes(np.random.default_rng(seed), num_scenes, width=width, height=height, **kind)


def all_captions(seed: int, num_scenes: int) -> list[str]:
    scenes, words = scenes_of(seed, num_scenes), Random(seed)
    return [varied(describe(scenes, index, words), words) for index in range(num_scenes)]


def test_a_seed_gives_the_same_scenes_pictures_and_captions_again() -> None:
    one, again, other = scenes_of(3, 12), scenes_of(3, 12), scenes_of(4, 12)
    for field in fields(Scenes):
        assert np.array_equal(getattr(one, field.name), getattr(again, field.name))
    assert torch.equal(render(one), render(again))
    assert not torch.equal(render(one), render(other))
    assert all_captions(5, 50) == all_captions(5, 50)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_main_object_is_always_wholly_in_the_picture(width: int, height: int) -> None:
    scenes = scenes_of(1, 500, width, height)
    reach = REACH * scenes.radii[:, 0, :, None]
    assert (scenes.centres[:, 0] - reach >= 1.9).all()
    assert (scenes.centres[:, 0] + reach <= np.array([width, height]) - 1.9).all()


def test_a_companion_is_smaller_of_another_colour_and_never_touched() -> None:
    scenes = scenes_of(2, 1000)
    there = scenes.has_companion
    assert 0.15 < there.mean() < 0.5
    assert (scenes.companion_colour[there] != scenes.colour[there]).all()
    radii = scenes.radii[there]
    assert (radii[:, 0] >= 1.39 * radii[:, 1]).all()
    gap = np.linalg.norm(scenes.centres[there, 0] - scenes.centres[there, 1], axis=-1)
    assert (gap >= REACH * radii.sum(1) + 1.9).all()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_pictures_are_flat_colours_with_smooth_edges(width: int, height: int) -> None:
    scenes = scenes_of(6, 8, width, height)
    video = render(scenes)
    assert video.shape == (8, NUM_FRAMES, height, width, 3)
    assert video.min() >= 0
    assert video.max() <= 1
    for index in range(8):
        own = torch.from_numpy(BACKGROUND_RGB[scenes.colour[index]] / 255)
        near = (video[index] - own).abs().amax(-1) < 1e-4
        areas = near.sum((1, 2)) / torch.from_numpy(scenes.radii[index, 0] ** 2)
        assert (areas > 0.8).all()  # nearly all of a ring is less than a disc
        assert (areas < 3.2).all()


def test_a_scene_looks_the_same_in_any_batch() -> None:
    scenes = scenes_of(8, 6)
    alone = {
        field.name: getattr(scenes, field.name)[4:5]
        for field in fields(Scenes)
        if field.name not in ("width", "height")
    }
    assert torch.equal(render(Scenes(width=64, height=64, **alone))[0], render(scenes)[4])


def test_every_pair_of_attributes_is_trained_on_and_no_held_out_triple_is() -> None:
    scenes = scenes_of(9, 20_000)
    names = np.stack([scenes.colour, scenes.shape, scenes.motion])
    assert not is_held_out(*names).any()
    counts = (len(COLOURS), len(SHAPES), len(MOTIONS))
    unseen_turns = {(SHAPES.index(shape), MOTIONS.index("rotate")) for shape in ("circle", "ring")}
    for one, other in ((0, 1), (0, 2), (1, 2)):
        seen = set(zip(names[one].tolist(), names[other].tolist(), strict=True))
        missing = {(a, b) for a in range(counts[one]) for b in range(counts[other])} - seen
        assert missing == (unseen_turns if (one, other) == (1, 2) else set())


def test_evaluation_never_shares_a_template_or_a_combination_with_training() -> None:
    assert not set(captions.TEMPLATES) & set(captions.HELD_OUT_TEMPLATES)
    cases = evaluation_cases()
    assert len(cases) == 200
    assert cases == evaluation_cases()
    assert len({case.caption for case in cases}) > 190
    triples = np.array(
        [(COLOURS.index(c.colour), SHAPES.index(c.shape), MOTIONS.index(c.motion)) for c in cases]
    )
    assert is_held_out(*triples.T).all()
    assert set(triples[:, 2]) == set(range(len(MOTIONS)))
    assert not {case.caption for case in cases} & set(all_captions(10, 5000))


def test_a_caption_names_its_scene() -> None:
    scenes, words = scenes_of(11, 400), Random(11)
    for index in range(400):
        caption = describe(scenes, index, words)
        colour, shape, motion = scenes.truth(index)
        assert re.search(rf"\b({'|'.join(captions._COLOUR_WORDS[colour])})\b", caption)
        assert re.search(rf"\b({'|'.join(captions._SHAPE_WORDS[shape])})\b", caption)
        stems = [pair[0].split(" {")[0] for pair in captions._MOTION_WORDS[motion]]
        stems += [pair[1].split(" {")[0] for pair in captions._MOTION_WORDS[motion]]
        assert any(stem in caption for stem in stems), (caption, motion)
        assert "  " not in caption
        assert "{" not in caption


def test_every_word_of_a_caption_is_one_token_and_hardly_a_caption_is_cut() -> None:
    tokenizer = make_tokenizer()
    texts = all_captions(12, 2000) + [case.caption for case in evaluation_cases()]
    words = {word for text in texts for word in re.findall(r"[a-z]+", text)}
    assert words <= set(vocabulary())
    assert all(len(tokenizer.tokenize(word)) == 1 for word in words)
    lengths = np.array([len(ids) for ids in tokenizer(texts).input_ids])
    assert (lengths > CAPTION_TOKENS).mean() < 0.002
    assert tokenizer.tokenize("A Red CIRCLE") == tokenizer.tokenize("a red circle")


def test_scenes_drawn_by_other_processes_are_the_same(tmp_path) -> None:
    file = tmp_path / "tokenizer.json"
    make_tokenizer().backend_tokenizer.save(str(file))
    orders = [
        Order(seed=1, number=n, num_scenes=2, width=64, height=96, num_captions=3, tokenizer=file)
        for n in range(5)
    ]
    for order, drawn in zip(orders, draw_all(orders), strict=True):
        alone = draw(order)
        assert np.array_equal(drawn.ids, alone.ids)
        assert np.array_equal(drawn.scenes.centres, alone.scenes.centres)
        assert drawn.ids.shape == (2, 3, CAPTION_TOKENS)
        ends = np.take_along_axis(drawn.ids, drawn.lengths[..., None].astype(int) - 1, axis=-1)
        assert (ends == 1).all()  # the end marker
