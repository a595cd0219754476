"""Two clips of one prompt and noise, compared: in processes of their own where there is much to compare."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from pipeline.models.tiny.captions import Case
from pipeline.quality import i420
from pipeline.quality.compare import Difference, Frames, compare
from pipeline.quality.oracle import Reading, read_clip
from storage.vmaf import LEAST_SIDE, vmaf

ASPECTS = ("colour", "shape", "motion")
_WORTH_PROCESSES_BYTES = 30_000_000
_MOST_PROCESSES = 12


@dataclass(frozen=True, kw_only=True)
class KeptClip:
    """Bare I420 frames in a file."""

    path: Path
    width: int
    height: int
    num_frames: int

    @property
    def num_bytes(self) -> int:
        return self.num_frames * self.height * 3 // 2 * self.width

    def frames(self) -> Frames:
        """Of the file, read where they are looked at."""
        shape = (self.num_frames, self.height * 3 // 2, self.width)
        return np.memmap(self.path, dtype=np.uint8, mode="r", shape=shape)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """truth: what both clips must show, where that is known. with_vmaf: where the clips are large enough."""

    id: str
    reference: KeptClip
    candidate: KeptClip
    truth: Case | None
    with_vmaf: bool


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a clip shows by the oracle, and which of ASPECTS are as they should be."""

    reading: Reading
    right: tuple[bool, bool, bool]

    @property
    def all_right(self) -> bool:
        return all(self.right)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """reference, candidate: None without a known truth. vmaf: None where it was not asked or says nothing."""

    id: str
    difference: Difference
    vmaf: float | None
    reference: Shown | None
    candidate: Shown | None

    @property
    def is_lost(self) -> bool:
        """The reference shows all that it should, the candidate does not."""
        if self.reference is None or self.candidate is None:
            return False
        return self.reference.all_right and not self.candidate.all_right


def compare_pairs(pairs: Sequence[Pair]) -> list[Compared]:
    """In their order. Raises VideoError where VMAF cannot be had."""
    if sum(pair.candidate.num_bytes for pair in pairs) < _WORTH_PROCESSES_BYTES:
        return [compare_pair(pair) for pair in pairs]
    num_processes = min(_MOST_PROCESSES, os.cpu_count() or 1, len(pairs))
    # Spawned: a fork of a process that has used the card cannot be trusted.
    pool = ProcessPoolExecutor(num_processes, get_context("spawn"), initializer=_ignore_interrupts)
    try:
        return list(pool.map(compare_pair, pairs, chunksize=max(1, len(pairs) // (8 * num_processes))))
    finally:
        pool.shutdown(cancel_futures=True)


def compare_pair(pair: Pair) -> Compared:
    reference, candidate = pair.reference.frames(), pair.candidate.frames()
    return Compared(
        id=pair.id,
        difference=compare(reference, candidate),
        vmaf=_vmaf(pair) if pair.with_vmaf else None,
        reference=_shown(reference, pair.truth),
        candidate=_shown(candidate, pair.truth),
    )


def _vmaf(pair: Pair) -> float | None:
    width, height = pair.reference.width, pair.reference.height
    same_size = (width, height) == (pair.candidate.width, pair.candidate.height)
    if min(width, height) < LEAST_SIDE or not same_size:
        return None
    if pair.reference.num_frames != pair.candidate.num_frames:
        return None
    return vmaf(pair.candidate.path, reference=pair.reference.path, width=width, height=height)


def _shown(frames: Frames, truth: Case | None) -> Shown | None:
    if truth is None:
        return None
    reading = read_clip(i420.to_rgb(frames))
    colour, shape, motion = (getattr(reading, aspect) == getattr(truth, aspect) for aspect in ASPECTS)
    return Shown(reading=reading, right=(colour, shape, motion))


def _ignore_interrupts() -> None:
    """Ctrl-C reaches these processes too, but what it means is for the parent to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
