"""A worker's engine that keeps its frames: in files beside each other, for the parent to compare."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from manifests.errors import OutOfSpace, VideoError
from manifests.job import Batch, Bucket
from pipeline.rendering import Renderer, Rendering
from storage.filesystem import is_out_of_space


def keep_frames(device: str, *, factory: Callable[[str], Renderer], folder: Path) -> Renderer:
    """A module-level function, so that a spawned worker can be told to call it."""
    return FrameKeeper(factory(device), folder=folder)


def frames_file(folder: Path, id: str) -> Path:
    """Where a job's frames are: bare I420, one after another."""
    return folder / f"{sha256(id.encode()).hexdigest()}.i420"


def read_notes(folder: Path) -> list[dict[str, float]]:
    """What each batch took: num_clips, device_s without loading, steps_computed, steps_skipped."""
    return [
        json.loads(text)
        for path in folder.glob("batches-*.jsonl")
        for text in path.read_text(encoding="utf-8").splitlines()
    ]


class FrameKeeper:
    """A Renderer that keeps what another one gives."""

    def __init__(self, renderer: Renderer, *, folder: Path) -> None:
        self.gpu_name = renderer.gpu_name
        self._renderer = renderer
        self._folder = folder

    def encode(self, bucket: Bucket, texts: Sequence[str]) -> None:
        self._renderer.encode(bucket, texts)

    def render(self, batch: Batch) -> Rendering:
        rendering = self._renderer.render(batch)
        try:
            for clip in rendering.clips:
                if clip.frames is not None:
                    # Not `tofile`, whose error does not say that the disk is full.
                    frames_file(self._folder, clip.job_id).write_bytes(np.ascontiguousarray(clip.frames).data)
            self._note(rendering)
        except OSError as error:
            # Each clip's, as where one cannot be written: a batch would be tried again on a full disk.
            kind = OutOfSpace if is_out_of_space(error) else VideoError
            failure = kind(f"frames cannot be kept in {self._folder}: {error.strerror}")
            lost = (replace(clip, frames=None, error=failure) for clip in rendering.clips)
            return replace(rendering, clips=tuple(lost))
        return rendering

    def _note(self, rendering: Rendering) -> None:
        """A line in a file of this process's own: there may be several."""
        times = rendering.times
        note = {
            "num_clips": len(rendering.clips),
            "device_s": times.encode_s + times.denoise_s + times.decode_s,
            "steps_computed": rendering.steps_computed,
            "steps_skipped": rendering.steps_skipped,
        }
        with (self._folder / f"batches-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")
