"""What the manifest tests share: a small model, settings, and a short way to read a table."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from manifests.errors import ModelError
from manifests.job import Weights
from manifests.model_spec import ModelSpec
from manifests.planner import History, Plan, plan
from manifests.reader import Reading, read_manifest
from manifests.settings import ReadSettings

SPEC = ModelSpec(
    name="tiny",
    revision="rev-1",
    engine="wan",
    multiple=16,
    temporal=4,
    min_side=32,
    max_side=1280,
    max_frames=81,
    patch_pixels=16,
    default_width=64,
    default_height=64,
    default_num_frames=17,
    default_fps=Fraction(8),
    default_steps=4,
    default_guidance_scale=5.0,
    default_guidance_scale_2=None,
    default_flow_shift=3.0,
    default_negative_prompt="blurry",
    resolutions={"480p": (832, 480)},
    two_experts=False,
    max_tokens=20,
    count_tokens=lambda prompts: [len(prompt.split()) for prompt in prompts],
    cap=lambda width, height, num_frames: 4,
)
TWO_EXPERTS = replace(
    SPEC,
    name="moe",
    revision="rev-2",
    two_experts=True,
    default_guidance_scale_2=3.5,
    default_fps=Fraction(16),
)
DISTILLED = replace(
    SPEC, name="distilled", revision="rev-3", few_step="the student", default_guidance_scale=1.0
)
SETTINGS = ReadSettings(
    model="tiny", preset="exact", crf=18, encoder_preset="medium", strict=False, tags=frozenset()
)


def model_spec(weights: Weights) -> ModelSpec:
    """tiny comes with a few-step LoRA, distilled is a few-step checkpoint; every LoRA but `none.safetensors`
    is there."""
    specs = {"tiny": SPEC, "moe": TWO_EXPERTS, "distilled": DISTILLED}
    if weights.model not in specs:
        raise ModelError(f"no such model: {weights.model}")
    if weights.lora == "none.safetensors":
        raise ModelError(f"no such LoRA: {weights.lora}")
    if weights.few_step and weights.model == "moe":
        raise ModelError("`turbo` needs weights that were trained for a few steps: moe")
    spec = DISTILLED if weights.few_step else specs[weights.model]
    return spec if weights.lora is None else replace(spec, revision=f"{spec.revision}+{weights.lora}")


def read_file(path: Path | str, **changes: Any) -> Reading:
    return read_manifest(str(path), settings=replace(SETTINGS, **changes), model_spec=model_spec)


def read_columns(folder: Path, columns: dict[str, Any], **changes: Any) -> Reading:
    """Write columns as a manifest and read it; a missing prompt column is filled in."""
    rows = len(next(iter(columns.values())))
    prompts = {} if "prompt" in columns else {"prompt": [f"prompt {row}" for row in range(rows)]}
    path = folder / "manifest.parquet"
    pq.write_table(pa.table(prompts | columns), path)
    return read_file(path, **changes)


def verdicts(reading: Reading) -> dict[int, str]:
    """Row -> `ok`, or the column it was rejected for."""
    rows = dict.fromkeys(reading.jobs["row"].to_pylist(), "ok")
    return rows | {row["row"]: row["column"] for row in reading.rejected.to_pylist()}


def by_row(reading: Reading, column: str) -> dict[int, Any]:
    values = zip(reading.jobs["row"].to_pylist(), reading.jobs[column].to_pylist(), strict=True)
    return dict(values)


CLIPS = pa.schema(
    [
        ("id", pa.string()),
        ("fingerprint", pa.string()),
        ("file", pa.string()),
        ("model_revision", pa.string()),
        ("numerics", pa.string()),
        ("present", pa.bool_()),
    ]
)
FAILURES = pa.schema(
    [("id", pa.string()), ("fingerprint", pa.string()), ("number", pa.int32()), ("reason", pa.string())]
)


def history_of(
    reading: Reading | None = None,
    *,
    clips: dict[str, Any] | None = None,
    failures: list[dict[str, Any]] | None = None,
    caps: dict[str, int] | None = None,
    probed: dict[str, int] | None = None,
) -> History:
    """A history in which every job of reading was delivered; clips: columns to replace in it."""
    delivered = CLIPS.empty_table()
    jobs = reading.jobs if reading is not None else None
    if jobs is not None:
        columns = {
            "id": jobs["id"],
            "fingerprint": jobs["fingerprint"],
            "file": [f"{id}.mp4" for id in jobs["id"].to_pylist()],
            "model_revision": jobs["model_revision"],
            "numerics": ["n1"] * jobs.num_rows,
            "present": [True] * jobs.num_rows,
        }
        delivered = pa.table(columns | (clips or {}), schema=CLIPS)
    return History(
        clips=delivered,
        failures=pa.Table.from_pylist(failures or [], schema=FAILURES),
        previous=lambda ids: jobs.filter(pa.compute.is_in(jobs["id"], value_set=ids)),
        caps=caps or {},
        probed=probed or {},
    )


def plan_of(reading: Reading, history: History | None = None, **changes: Any) -> Plan:
    defaults: dict[str, Any] = {
        "model_spec": model_spec,
        "refresh": frozenset(),
        "numerics": "n1",
        "limit": None,
        "select": (),
    }
    return plan(reading, history=history or history_of(), **(defaults | changes))
