"""The engine of a verification: it keeps what another one gives, and notes what each batch took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jobs.verification.frames import FrameKeeper, frames_file, read_notes
from pipeline.rendering import RenderedClip, Rendering, StageTimes

FRAMES = np.arange(2 * 6 * 4, dtype=np.uint8).reshape(2, 6, 4)


class Engine:
    gpu_name = "card"

    def __init__(self) -> None:
        self.encoded: list[Any] = []

    def encode(self, bucket: Any, texts: Any) -> None:
        self.encoded.append((bucket, texts))

    def render(self, batch: Any) -> Rendering:
        return Rendering(
            clips=(RenderedClip(job_id="a", frames=FRAMES), RenderedClip(job_id="b", frames=None)),
            times=StageTimes(load_s=100.0, encode_s=1.0, denoise_s=20.0, decode_s=3.0),
            peak_memory_bytes=1,
            steps_computed=30,
            steps_skipped=10,
        )


def test_frames_are_kept_as_they_are_and_each_batch_has_its_note(tmp_path: Path) -> None:
    keeper = FrameKeeper(Engine(), folder=tmp_path)
    batch: Any = None
    assert [clip.job_id for clip in keeper.render(batch).clips] == ["a", "b"]
    keeper.render(batch)
    assert frames_file(tmp_path, "a").read_bytes() == FRAMES.tobytes()
    assert not frames_file(tmp_path, "b").exists()
    note = {"num_clips": 2, "device_s": 24.0, "steps_computed": 30, "steps_skipped": 10}
    assert read_notes(tmp_path) == [note, note]


def test_prompts_are_encoded_ahead_by_the_engine(tmp_path: Path) -> None:
    engine, bucket = Engine(), object()
    FrameKeeper(engine, folder=tmp_path).encode(bucket, ["text"])  # type: ignore[arg-type]
    assert engine.encoded == [(bucket, ["text"])]
