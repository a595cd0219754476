"""`vgbatch bench`: what it accepts, what it prints, and the files that its clips end in."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers.utils
import numpy as np
import pytest
from diffusers.utils import import_utils
from rich.console import Console
from typer.testing import CliRunner

from jobs import benching
from jobs.bench_table import show_bench
from jobs.benching import BenchPlan, plan_bench, run_bench
from jobs.cli import app
from manifests.errors import UsageError
from pipeline.bench.footage import as_i420, make_footage
from pipeline.bench.results import DEFAULT_STAGES
from storage.video import ClipMetadata, VideoSettings, encode_clip
from tests.run_cases import ROOT

TINY_FLAGS = {"size": "64x32", "num_frames": 5, "steps": 2, "seconds": 0.0}


def plan(shape: str | None = "tiny", **flags: Any) -> BenchPlan:
    defaults: dict[str, Any] = {
        "model": None,
        "aliases": {},
        "stages": [],
        "size": None,
        "num_frames": None,
        "steps": None,
        "seconds": 20.0,
    }
    return plan_bench(shape, **(defaults | flags))


def refusal(*args: Any, **flags: Any) -> UsageError:
    with pytest.raises(UsageError) as raised:
        plan(*args, **flags)
    assert raised.value.hint
    return raised.value


def run(plan: BenchPlan) -> dict[str, Any]:
    return run_bench(plan, command="vgbatch bench", say=lambda text: None)


def printed(facts: dict[str, Any]) -> str:
    stream = io.StringIO()
    show_bench(facts, Console(file=stream, width=100))
    return stream.getvalue()


def test_without_a_word_it_is_the_five_billion_shape_at_five_seconds() -> None:
    default = plan(None)
    assert (default.shape.name, default.stages) == ("Wan2.2-TI2V-5B", DEFAULT_STAGES)
    assert (default.width, default.height, default.num_frames, default.steps) == (1344, 768, 121, 50)


def test_what_cannot_be_measured_is_refused_with_what_can() -> None:
    assert "Wan2.1-T2V-14B" in (refusal("Wan9").hint or "")
    assert "steady" in (refusal(stages=["forwards"]).hint or "")
    assert "multiples of 32" in (refusal(size="1344x770").hint or "")
    assert "--size 64x64" in (refusal(size="768p").hint or "")
    assert "multiples of 4 and one more" in (refusal(num_frames=120).hint or "")
    assert "--seconds 20" in (refusal(seconds=float("nan")).hint or "")
    assert "from 1 to" in (refusal(num_frames=10**9 + 1).hint or "")
    assert refusal("tiny", model="builtin").message.endswith("tiny, builtin")


def test_a_repeated_stage_is_run_once_in_the_order_given() -> None:
    assert plan(stages=["decode", "forward", "decode"]).stages == ("decode", "forward")


def test_an_unknown_shape_is_told_without_loading_torch() -> None:
    code = (
        "import sys\nfrom manifests.errors import UsageError\nfrom jobs.cli import app\n"
        "try:\n    app(['bench', 'Wan9'], standalone_mode=False)\n"
        "except UsageError:\n    print([name for name in ('torch', 'diffusers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_json_is_on_stdout_alone_and_holds_every_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = "bench tiny --size 64x32 --frames 5 --seconds 0 --stage forward --json"
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert {"torch", "diffusers", "cuda"} <= facts["versions"].keys()
    assert facts["card"]
    assert facts["command"].startswith("vgbatch")
    (stage,) = facts["stages"]
    assert [column["name"] for column in stage["columns"]] == [
        "diffusers",
        "diffusers tuned",
        "ours",
        "ours fp8",
    ]
    for column in stage["columns"]:
        assert column["samples_ms"]
        assert column["tflops"] > 0
    assert stage["matmul_samples_ms"]
    assert "timing forward" in result.stderr


def test_tables_fit_a_hundred_columns_and_say_what_a_timer_includes() -> None:
    text = printed(run(plan(stages=["forward", "decode"], **TINY_FLAGS)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("in the timer:" in line for line in lines) == 2
    for label in ("median, ms", "times as fast", "TFLOP/s", "of matmul's", "relative difference", "samples"):
        assert label in text
    assert "peak memory" not in text  # of the CPU nothing is known


def test_the_table_of_a_card_shows_memory_and_how_busy_it_was() -> None:
    column = {
        "name": "ours",
        "samples_ms": [945.25, 946.75, 946.0],
        "median_ms": 946.0,
        "peak_memory_bytes": 11 * 2**30 + 2**29,
        "ratio": 1.52,
        "tflops": 661.2,
        "matmul_frac": 0.845,
        "facts": {"attention": "flash3"},
    }
    stage = {
        "stage": "steady",
        "timed": "one clip",
        "notes": ["a note"],
        "matmul_tflops": 782.4,
        "facts": {"gpu_busy_frac": 0.9731},
        "columns": [column],
    }
    facts = {
        "shape": "Wan2.2-TI2V-5B",
        "weights": "random",
        "dtype": "bfloat16",
        "card": "NVIDIA H200",
        "versions": {"torch": "2.11.0"},
        "started_at": "2026-12-01T00:00:00+00:00",
        "stages": [stage],
    }
    text = printed(facts)
    for part in (
        "946.0",
        "1.52x",
        "661",
        "of matmul's 782",
        "84.5%",
        "11.5 GiB",
        "GPU busy  97.3%",
        "flash3",
    ):
        assert part in text


def test_small_clips_are_told_by_the_second() -> None:
    column = {
        "name": "ours",
        "samples_ms": [40.0],
        "median_ms": 40.0,
        "peak_memory_bytes": None,
        "ratio": 5.25,
        "tflops": None,
        "matmul_frac": None,
        "facts": {},
    }
    stage = {
        "stage": "small",
        "timed": "one clip",
        "notes": [],
        "matmul_tflops": None,
        "facts": {"cap": 8},
        "columns": [column],
    }
    facts = dict.fromkeys(("shape", "weights", "dtype", "card", "started_at"), "")
    rows = printed(facts | {"versions": {}, "stages": [stage]}).splitlines()
    assert ["clips", "a", "second", "25"] in [row.split() for row in rows]


def test_a_checkpoint_takes_the_place_of_random_weights() -> None:
    wanted = plan(None, model="builtin", stages=["forward"], size="32x32", num_frames=5, seconds=0.0)
    facts = run(wanted)
    assert facts["weights"] == wanted.model.spec.revision
    (stage,) = facts["stages"]
    *_, exact, fp8 = (column["facts"]["relative_difference"] for column in stage["columns"][1:])
    assert exact < 1e-4
    assert 1e-3 < fp8 < 0.2
    assert "revision" in printed(facts)


def test_clips_need_what_diffusers_writes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_utils, "is_imageio_available", lambda: False)
    with pytest.raises(UsageError, match="imageio") as raised:
        run(plan(stages=["clip"]))
    assert "pip install imageio" in (raised.value.hint or "")


def test_either_side_writes_the_same_footage_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[dict[str, Any]] = []
    encoded: list[Any] = []

    def export(frames: Any, path: str, *, fps: float) -> None:
        exported.append({"frames": frames, "fps": fps})

    def encode(frames: Any, **settings: Any) -> Any:
        encoded.append((frames, encode_clip(frames, **settings)))

    monkeypatch.setattr(import_utils, "is_imageio_available", lambda: True)
    monkeypatch.setattr(diffusers.utils, "export_to_video", export)
    monkeypatch.setattr(benching, "encode_clip", encode)
    facts = run(plan(stages=["clip"], **TINY_FLAGS))
    (stage,) = facts["stages"]
    assert len(stage["columns"]) == 3
    assert "natural" in " ".join(stage["notes"])
    assert len(exported) == 2
    assert exported[0]["fps"] == 8.0
    frames, clip = encoded[0]
    assert clip.num_bytes > 0
    floats = exported[0]["frames"]
    assert floats.dtype == np.float32
    assert floats.shape == (5, 32, 64, 3)
    assert np.array_equal(as_i420((floats * 255).round().astype(np.uint8)), frames)


def test_footage_is_always_the_same_moves_and_costs_an_encoder_far_less_than_noise(tmp_path: Path) -> None:
    size = {"width": 128, "height": 96, "num_frames": 12}
    footage = make_footage(**size)
    assert np.array_equal(footage, make_footage(**size))
    assert footage.shape == (12, 96, 128, 3)
    changes = np.abs(np.diff(footage.astype(int), axis=0)).mean(axis=(1, 2, 3))
    assert changes.min() > 2
    noise = np.random.default_rng(0).integers(0, 256, footage.shape, np.uint8)
    settings = VideoSettings(fps=plan().shape.fps, **size)
    metadata = ClipMetadata(id="a", fingerprint="0" * 64, seed=0, model="m")
    sizes = [
        encode_clip(
            as_i420(video), settings=settings, metadata=metadata, partial=tmp_path / f"{name}.mp4"
        ).num_bytes
        for name, video in (("footage", footage), ("noise", noise))
    ]
    assert 10_000 < sizes[0] < sizes[1] / 3
