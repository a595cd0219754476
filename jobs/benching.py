"""`vgbatch bench`: diffusers' own pipeline and ours, side by side in one process."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manifests.errors import UsageError
from pipeline.bench.results import DEFAULT_STAGES, STAGES, WRITING_STAGES, Column, StageResult
from pipeline.models.resolve import ResolvedModel, resolve_model
from pipeline.models.shapes import Shape, checkpoint_shape, shape_named
from storage.metadata import ClipMetadata
from storage.video import VideoSettings, encode_clip

if TYPE_CHECKING:
    from pipeline.bench.clips import Mp4
    from pipeline.bench.setting import Setting
    from pipeline.bench.weights import Weights

DEFAULT_SHAPE = "Wan2.2-TI2V-5B"


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What to measure. model: the checkpoint, None for random weights. width, height: pixels.

    seconds: for each side of a stage that takes turns.
    """

    shape: Shape
    model: ResolvedModel | None
    stages: Sequence[str]
    width: int
    height: int
    num_frames: int
    steps: int
    seconds: float


def plan_bench(
    shape: str | None,
    *,
    model: str | None,
    aliases: Mapping[str, str],
    stages: Sequence[str],
    size: str | None,
    num_frames: int | None,
    steps: int | None,
    seconds: float,
) -> BenchPlan:
    """Everything checked that can be without torch. Raises UsageError, or ModelError for a checkpoint."""
    if shape is not None and model is not None:
        raise UsageError(
            f"a shape and a checkpoint were both given: {shape}, {model}", hint="choose one of them"
        )
    for stage in stages:
        if stage not in STAGES:
            raise UsageError(f"no such stage: {stage}", hint=f"stages: {', '.join(STAGES)}")
    if not math.isfinite(seconds):
        raise UsageError(f"--seconds: {seconds}", hint="such as `--seconds 20`")
    resolved = None if model is None else resolve_model(model, aliases=aliases)
    found = (
        shape_named(shape or DEFAULT_SHAPE)
        if resolved is None
        else checkpoint_shape(resolved.source.folder, resolved.spec)
    )
    width, height = (found.width, found.height) if size is None else _parsed_size(size, found)
    frames = found.num_frames if num_frames is None else _valid_frames(num_frames, found)
    return BenchPlan(
        shape=found,
        model=resolved,
        stages=tuple(dict.fromkeys(stages)) or DEFAULT_STAGES,
        width=width,
        height=height,
        num_frames=frames,
        steps=found.steps if steps is None else steps,
        seconds=seconds,
    )


def _parsed_size(text: str, shape: Shape) -> tuple[int, int]:
    multiple = shape.patch_pixels
    largest = multiple * int(shape.transformer.get("rope_max_seq_len", 1024))
    valid = f"{shape.name} renders multiples of {multiple} from {multiple} to {largest}"
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    if match is None:
        raise UsageError(f"--size: {text}", hint=f"such as `--size {shape.width}x{shape.height}`; {valid}")
    width, height = int(match[1]), int(match[2])
    if any(side % multiple or not multiple <= side <= largest for side in (width, height)):
        raise UsageError(f"--size: {text}", hint=valid)
    return width, height


def _valid_frames(num_frames: int, shape: Shape) -> int:
    most = shape.temporal * (int(shape.transformer.get("rope_max_seq_len", 1024)) - 1) + 1
    if (num_frames - 1) % shape.temporal or not 1 <= num_frames <= most:
        hint = f"{shape.name} renders multiples of {shape.temporal} and one more, from 1 to {most}"
        raise UsageError(f"--frames: {num_frames}", hint=hint)
    return num_frames


def run_bench(plan: BenchPlan, *, command: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs every stage; JSON-ready. say: takes a line on what is going on. Raises OutOfDeviceMemory."""
    for stage in plan.stages:
        if stage in WRITING_STAGES:
            _require_exporter(stage)
    from pipeline.bench.setting import Setting
    from pipeline.bench.stages import run_stage
    from pipeline.devices import device_name, list_devices, versions

    device = list_devices()[0]
    if device == "cpu":
        say(
            "no GPU here: this is the CPU, in float32, which takes hours for a published shape; "
            "`--model builtin --size 64x64` is quick"
        )
    started_at = datetime.now(UTC)
    setting = Setting(
        weights=_weights(plan, say),
        device=device,
        width=plan.width,
        height=plan.height,
        num_frames=plan.num_frames,
        steps=plan.steps,
        seconds=plan.seconds,
        say=say,
    )
    stages = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in plan.stages:
            say(f"stage {stage}: {plan.shape.name}, {setting.label}")
            mp4 = _mp4(setting, Path(folder), say) if stage in WRITING_STAGES else None
            stages.append(_stage_facts(run_stage(stage, setting, mp4=mp4)))
    return {
        "command": command,
        "started_at": started_at.isoformat(timespec="seconds"),
        "card": device_name(device),
        "versions": versions(),
        "shape": plan.shape.name,
        "weights": "random" if plan.model is None else plan.model.spec.revision,
        "width": plan.width,
        "height": plan.height,
        "num_frames": plan.num_frames,
        "steps": plan.steps,
        "seconds": plan.seconds,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "stages": stages,
    }


def _require_exporter(stage: str) -> None:
    from diffusers.utils.import_utils import is_imageio_available

    if not is_imageio_available():
        raise UsageError(
            f"the stage `{stage}` needs imageio: diffusers writes its MP4 with it",
            hint="`pip install imageio`, or choose other stages",
        )


def _weights(plan: BenchPlan, say: Callable[[str], None]) -> Weights:
    from pipeline.bench.weights import CheckpointWeights, RandomWeights
    from pipeline.models.hub import fetch_weights

    if plan.model is None:
        return RandomWeights(plan.shape)
    source = plan.model.source
    if source.hub_id is None:
        return CheckpointWeights(plan.shape, source.folder)
    say(f"fetching {source.hub_id}")
    return CheckpointWeights(plan.shape, fetch_weights(source.hub_id, commit=source.revision))


def _mp4(setting: Setting, folder: Path, say: Callable[[str], None]) -> Mp4:
    """Either side's way from finished frames to a file, its frames made ready here, outside of any timer."""
    import numpy as np
    from diffusers.utils import export_to_video

    from pipeline.bench.clips import Mp4
    from pipeline.bench.footage import as_i420, make_footage

    say("making footage for the MP4s")
    rgb = make_footage(width=setting.width, height=setting.height, num_frames=setting.num_frames)
    floats, i420 = rgb.astype(np.float32) / 255, as_i420(rgb)
    fps = setting.shape.fps
    settings = VideoSettings(
        width=setting.width, height=setting.height, num_frames=setting.num_frames, fps=fps
    )
    metadata = ClipMetadata(id="bench", fingerprint="0" * 64, seed=0, model=setting.shape.name)
    return Mp4(
        reference=lambda: export_to_video(floats, str(folder / "diffusers.mp4"), fps=float(fps)),
        ours=lambda: encode_clip(i420, settings=settings, metadata=metadata, partial=folder / "ours.mp4"),
    )


def _stage_facts(result: StageResult) -> dict[str, Any]:
    return {
        "stage": result.stage,
        "timed": result.timed,
        "notes": list(result.notes),
        "operations": result.operations,
        "matmul_tflops": result.matmul_tflops,
        "matmul_samples_ms": list(result.matmul_samples_ms),
        "facts": dict(result.facts),
        "columns": [_column_facts(result, column) for column in result.columns],
    }


def _column_facts(result: StageResult, column: Column) -> dict[str, Any]:
    return asdict(column) | {
        "median_ms": column.median_ms,
        "ratio": result.ratio(column),
        "tflops": result.tflops(column),
        "matmul_frac": result.matmul_share(column),
    }
