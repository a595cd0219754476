"""The table of jobs: one Arrow row for each valid manifest row, every default filled in."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pyarrow as pa

from manifests.job import Bucket, Job

# `row` counts from 0 within its file, as pandas, polars and DuckDB's file_row_number do.
JOBS_SCHEMA = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("fingerprint", pa.string(), nullable=False),  # 64 hex digits
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("negative_prompt", pa.string(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("num_frames", pa.int32(), nullable=False),
        pa.field("fps_num", pa.int32(), nullable=False),
        pa.field("fps_den", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("steps", pa.int32(), nullable=False),
        pa.field("guidance_scale", pa.float64(), nullable=False),
        pa.field("guidance_scale_2", pa.float64()),
        pa.field("flow_shift", pa.float64(), nullable=False),
        pa.field("preset", pa.string(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("model_revision", pa.string(), nullable=False),
        pa.field("crf", pa.int32(), nullable=False),
        pa.field("encoder_preset", pa.string(), nullable=False),
        pa.field("render_width", pa.int32(), nullable=False),
        pa.field("render_height", pa.int32(), nullable=False),
        pa.field("render_frames", pa.int32(), nullable=False),
        pa.field("priority", pa.int32(), nullable=False),
        pa.field("price", pa.decimal128(18, 6)),  # what this clip earns; null: not said
        pa.field("warning", pa.string()),  # what was adjusted or will be cut; null: nothing
        pa.field("tags", pa.map_(pa.string(), pa.string())),
        pa.field("lora", pa.string()),
    ]
)

# A row that cannot run. `id` is null where the row has none; `column` names what is wrong.
REJECTED_SCHEMA = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("column", pa.string(), nullable=False),
        pa.field("value", pa.string()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("tags", pa.map_(pa.string(), pa.string())),
    ]
)


def job_from_row(row: dict[str, Any]) -> Job:
    """The Job of one row of a JOBS_SCHEMA table, as `to_pylist` gives it."""
    return Job(
        id=row["id"],
        fingerprint=row["fingerprint"],
        prompt=row["prompt"],
        negative_prompt=row["negative_prompt"],
        width=row["width"],
        height=row["height"],
        num_frames=row["num_frames"],
        fps=Fraction(row["fps_num"], row["fps_den"]),
        seed=row["seed"],
        steps=row["steps"],
        guidance_scale=row["guidance_scale"],
        guidance_scale_2=row["guidance_scale_2"],
        flow_shift=row["flow_shift"],
        preset=row["preset"],
        model=row["model"],
        crf=row["crf"],
        encoder_preset=row["encoder_preset"],
        lora=row["lora"],
    )


# The columns that decide a bucket.
BUCKET_COLUMNS = [
    "model",
    "model_revision",
    "preset",
    "render_width",
    "render_height",
    "render_frames",
    "steps",
    "guidance_scale",
    "guidance_scale_2",
    "flow_shift",
    "lora",
]


def bucket_from_row(row: dict[str, Any]) -> Bucket:
    """The Bucket of one row that has BUCKET_COLUMNS."""
    return Bucket(
        model=row["model"],
        revision=row["model_revision"],
        preset=row["preset"],
        width=row["render_width"],
        height=row["render_height"],
        num_frames=row["render_frames"],
        steps=row["steps"],
        guidance_scale=row["guidance_scale"],
        guidance_scale_2=row["guidance_scale_2"],
        flow_shift=row["flow_shift"],
        lora=row["lora"],
    )
