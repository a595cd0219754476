"""Scenes with captions as token numbers, drawn by several processes while the card works. No torch here."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from pipeline.models.tiny.captions import describe, varied
from pipeline.models.tiny.scenes import Scenes, sample_scenes

CAPTION_TOKENS = 39  # with the padding's one a multiple of 8; hardly any caption is longer
_IN_PROCESS = 4  # so few chunks are not worth starting processes for


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to draw: the same order gives the same scenes and captions."""

    seed: int
    number: int
    num_scenes: int
    width: int
    height: int
    num_captions: int
    tokenizer: Path


@dataclass(frozen=True, kw_only=True)
class Described:
    """ids: (N, captions, CAPTION_TOKENS), zero past each end. lengths: (N, captions), end marker included."""

    scenes: Scenes
    ids: npt.NDArray[np.int16]
    lengths: npt.NDArray[np.int16]


def draw(order: Order) -> Described:
    key = [order.seed, order.number, order.width, order.height]
    rng = np.random.default_rng(key)
    scenes = sample_scenes(rng, order.num_scenes, width=order.width, height=order.height)
    words = Random(str(key))
    texts = [
        varied(describe(scenes, index, words), words)
        for index in range(order.num_scenes)
        for _ in range(order.num_captions)
    ]
    ids, lengths = tokenize(texts, order.tokenizer)
    shape = (order.num_scenes, order.num_captions)
    return Described(scenes=scenes, ids=ids.reshape(*shape, -1), lengths=lengths.reshape(shape))


def tokenize(texts: list[str], tokenizer: Path) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16]]:
    """(T, CAPTION_TOKENS) and (T,). The end marker stays when a text is cut."""
    encodings = _tokenizer(tokenizer).encode_batch(texts)
    ids = np.zeros((len(texts), CAPTION_TOKENS), np.int16)
    lengths = np.zeros(len(texts), np.int16)
    for row, encoding in enumerate(encodings):
        kept = (
            encoding.ids
            if len(encoding.ids) <= CAPTION_TOKENS
            else (encoding.ids[: CAPTION_TOKENS - 1] + encoding.ids[-1:])
        )
        ids[row, : len(kept)] = kept
        lengths[row] = len(kept)
    return ids, lengths


def draw_all(orders: Iterable[Order]) -> Iterator[Described]:
    """In the order asked for, drawn ahead by other processes where there are many."""
    orders = list(orders)
    if len(orders) <= _IN_PROCESS:
        yield from map(draw, orders)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    num_processes = max(1, min(12, (os.cpu_count() or 1) - 2))
    # Spawned: a fork of a process that has used the card cannot be trusted.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, spawn, initializer=ignore_interrupts) as pool:
        yield from pool.map(draw, orders)


def ignore_interrupts() -> None:
    """In a pool's process: Ctrl-C reaches it too, but what it means is for the parent to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@cache
def _tokenizer(file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(file))
