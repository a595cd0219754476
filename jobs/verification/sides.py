"""One side of a verification: its jobs, rendered as `run` renders them, and the frames that the engine gave.

Not those of the MP4s: what libx264 loses at crf 18 can be more than what an approximation changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from jobs.config import LEDGER_NAME, Settings
from jobs.models import Models
from jobs.prepare import Selection, read_settings
from jobs.runner import RunSummary, build_renderer, choose_devices, run
from jobs.verification.frames import frames_file, keep_frames, read_notes
from jobs.worker import RendererFactory
from manifests.job import Weights
from manifests.presets import TURBO
from manifests.reader import Reading, read_parts
from manifests.sources import Part
from manifests.table import bucket_from_row
from storage.embeddings import EmbeddingFolder
from storage.ledger import Ledger

# What a side decides for every row, whatever the row says.
_OF_A_SIDE = ("model", "lora", "preset")
# Few-step weights have a recipe of their own: a row's numbers are meant for the guided side.
_OF_A_SCHEDULE = ("steps", "guidance_scale", "guidance_scale_2", "flow_shift")


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one side renders. name: `reference` or `candidate`, its folder's too. jobs: JOBS_SCHEMA, by row as
    the other side's. revision: of the model and its LoRAs."""

    name: str
    model: str
    lora: str | None
    preset: str
    revision: str
    reading: Reading

    @property
    def jobs(self) -> pa.Table:
        return self.reading.jobs


def describe(side: Side) -> str:
    """`builtin with style.safetensors, fast`."""
    return f"{Weights(side.model, side.lora)}, {side.preset}"


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """What came of a side. files: delivered MP4s by id. frames: files of bare I420 by id. reasons: why a job
    has no clip. clip_s: device seconds of encoding, denoising and decoding a clip; None without any.
    skipped_frac: the share of forwards that were left out; None where none are counted.
    """

    summary: RunSummary
    gpu_name: str
    files: Mapping[str, Path]
    frames: Mapping[str, Path]
    reasons: Mapping[str, str]
    clip_s: float | None
    skipped_frac: float | None


def read_side(
    rows: pa.Table,
    *,
    name: str,
    model: str,
    lora: str | None,
    preset: str,
    file: str,
    settings: Settings,
    models: Models,
) -> Side:
    """The side's jobs for the rows of a prompt set. file: what messages call them. Raises as `read` does."""
    own = replace(settings, model=model, preset=preset)
    dropped = [*_OF_A_SIDE, *(_OF_A_SCHEDULE if preset == TURBO else ())]
    rows = rows.drop_columns([column for column in rows.column_names if column in dropped])
    if lora is not None:
        rows = rows.append_column("lora", pa.array([lora] * rows.num_rows, pa.string()))
    reading = read_parts([_part(rows, file)], settings=read_settings(own), model_spec=models.spec)
    # One for all rows: only what _OF_A_SIDE says decides it.
    first = reading.jobs.slice(0, 1).to_pylist()
    revision = bucket_from_row(first[0]).revision if first else ""
    return Side(name=name, model=model, lora=lora, preset=preset, revision=revision, reading=reading)


def _part(rows: pa.Table, file: str) -> Part:
    return Part(
        file=file, schema=rows.schema, num_rows=rows.num_rows, batches=lambda: iter(rows.to_batches())
    )


def render_side(
    side: Side,
    *,
    settings: Settings,
    folder: Path,
    frames: Path,
    models: Models,
    console: Console,
    command: str,
    factory: RendererFactory | None,
) -> Rendered:
    """folder: for its clips and a ledger of its own, empty. frames: for its frames, which the caller removes.

    Raises as `run` does.
    """
    frames.mkdir(parents=True)
    if factory is None:
        num_devices = len(choose_devices(settings))
        # Among the output folder's own, so that what a run has encoded is not encoded again.
        embeddings = EmbeddingFolder(settings.out, num_writers=num_devices)
        factory = partial(build_renderer, models=models.sources(), embeddings=embeddings)
    ledger = Ledger(folder / LEDGER_NAME)
    summary = run(
        side.reading,
        models=models,
        settings=replace(settings, out=folder, ledger=ledger.path, model=side.model, preset=side.preset),
        selection=Selection(),
        manifest=side.name,
        command=command,
        console=console,
        factory=partial(keep_frames, factory=factory, folder=frames),
        warns_of_unverified=False,
    )
    clips = ledger.clips_table(summary.run_id).to_pylist()
    batches = read_notes(frames)
    return Rendered(
        summary=summary,
        gpu_name=ledger.last_gpu_name() or "",
        files={row["id"]: folder / row["path"] for row in clips if row["path"] is not None},
        frames=_whole(side.jobs, frames),
        reasons={row["id"]: row["reason"] for row in clips if row["reason"] is not None},
        clip_s=_per_clip(batches),
        skipped_frac=_skipped_frac(batches),
    )


def _whole(jobs: pa.Table, folder: Path) -> dict[str, Path]:
    """The files that hold as many samples as their job's clip has."""
    found = {}
    for row in jobs.select(["id", "width", "height", "num_frames"]).to_pylist():
        path = frames_file(folder, row["id"])
        num_bytes = row["num_frames"] * row["height"] * 3 // 2 * row["width"]
        if path.exists() and path.stat().st_size == num_bytes:
            found[row["id"]] = path
    return found


def _per_clip(batches: Sequence[Mapping[str, float]]) -> float | None:
    num_clips = sum(batch["num_clips"] for batch in batches)
    return sum(batch["device_s"] for batch in batches) / num_clips if num_clips else None


def _skipped_frac(batches: Sequence[Mapping[str, float]]) -> float | None:
    num_skipped = sum(batch["steps_skipped"] for batch in batches)
    num_steps = num_skipped + sum(batch["steps_computed"] for batch in batches)
    return num_skipped / num_steps if num_steps else None
