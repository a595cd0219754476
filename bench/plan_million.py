"""How long a million rows take to read and plan, and how much memory: `python bench/plan_million.py`.

Each measurement is a fresh process: (a) nothing delivered yet, (b) every clip delivered before.
Target on two cores: 20 s and 1.5 GB each.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from manifests.model_spec import ModelSpec  # noqa: E402
from manifests.planner import History, Plan, plan  # noqa: E402
from manifests.reader import Reading, read_manifest  # noqa: E402
from manifests.settings import ReadSettings  # noqa: E402

NUM_ROWS = 1_000_000
PROMPT_BYTES = 200
SIZES = [(832, 480), (480, 832), (640, 640), (1280, 720)]
MAX_S = 20.0
MAX_RSS_BYTES = 1_500_000_000

MODEL = ModelSpec(
    name="bench",
    revision="0" * 40,
    engine="wan",
    multiple=16,
    temporal=4,
    min_side=64,
    max_side=1280,
    max_frames=121,
    patch_pixels=16,
    default_width=832,
    default_height=480,
    default_num_frames=81,
    default_fps=Fraction(16),
    default_steps=50,
    default_guidance_scale=5.0,
    default_guidance_scale_2=None,
    default_flow_shift=3.0,
    default_negative_prompt="blurry, low quality, watermark",
    resolutions={},
    two_experts=False,
    max_tokens=512,
    count_tokens=lambda prompts: [len(prompt.split()) for prompt in prompts],
    cap=lambda width, height, num_frames: 4,
)
SETTINGS = ReadSettings(
    model="bench", preset="exact", crf=18, encoder_preset="medium", strict=False, tags=frozenset()
)


def write_manifest(path: Path) -> None:
    """Distinct prompts, sizes in turn, a tag and a price; ids and seeds are left to be derived."""
    filler = "a red kite over a slate sea at dusk, slow pan, film grain, "
    prompts = [f"{filler * 4}{index:09d}"[-PROMPT_BYTES:] for index in range(NUM_ROWS)]
    turn = np.arange(NUM_ROWS) % len(SIZES)
    table = pa.table(
        {
            "prompt": prompts,
            "width": pa.array(np.array([width for width, _ in SIZES])[turn]),
            "height": pa.array(np.array([height for _, height in SIZES])[turn]),
            "customer": pa.array([f"customer-{index}" for index in range(100)]).take(
                pa.array(np.arange(NUM_ROWS) % 100)
            ),
            "price": pa.array(np.full(NUM_ROWS, 0.25)),
        }
    )
    pq.write_table(table, path)


def delivered(reading: Reading) -> pa.Table:
    """A history in which every job has its clip."""
    jobs = reading.jobs
    return pa.table(
        {
            "id": jobs["id"],
            "fingerprint": jobs["fingerprint"],
            "file": pa.array([f"{id}.mp4" for id in jobs["id"].to_pylist()]),
            "model_revision": jobs["model_revision"],
            "numerics": pa.array(["1"] * jobs.num_rows),
            "present": pa.array(np.ones(jobs.num_rows, np.bool_)),
        }
    )


def read_and_plan(manifest: str, clips: pa.Table) -> Plan:
    reading = read_manifest(manifest, settings=SETTINGS, model_spec=lambda name: MODEL)
    schema = pa.schema([("fingerprint", pa.string()), ("number", pa.int32()), ("reason", pa.string())])
    history = History(
        clips=clips,
        failures=schema.empty_table(),
        previous=lambda ids: reading.jobs.slice(0, 0),
        caps={},
    )
    return plan(
        reading,
        history=history,
        model_spec=lambda name: MODEL,
        refresh=frozenset(),
        numerics="1",
        limit=None,
        select=(),
    )


def measure(manifest: str, clips_file: str) -> None:
    """In the child: one line of JSON."""
    begin_s = time.perf_counter()
    clips = pq.read_table(clips_file)
    made = read_and_plan(manifest, clips)
    facts = {
        "wall_s": round(time.perf_counter() - begin_s, 2),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "to_render": made.jobs.num_rows,
        "batches": made.batches.num_rows,
        "reused": made.reused.num_rows,
    }
    print(json.dumps(facts))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        manifest, full, empty = (Path(folder, f"{name}.parquet") for name in ("manifest", "full", "empty"))
        write_manifest(manifest)
        clips = delivered(read_manifest(str(manifest), settings=SETTINGS, model_spec=lambda name: MODEL))
        pq.write_table(clips, full)
        pq.write_table(clips.slice(0, 0), empty)
        met = True
        for name, clips_file in (("nothing delivered", empty), ("all delivered", full)):
            child = [sys.executable, __file__, "--child", str(manifest), str(clips_file)]
            facts = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
            met &= facts["wall_s"] <= MAX_S and facts["peak_rss_bytes"] <= MAX_RSS_BYTES
            print(
                f"{name}: {facts['wall_s']} s, {facts['peak_rss_bytes'] / 1e9:.2f} GB, "
                f"{facts['to_render']} to render in {facts['batches']} batches, {facts['reused']} reused"
            )
    print("target met" if met else f"target missed: {MAX_S:g} s and {MAX_RSS_BYTES / 1e9:g} GB")
    return 0 if met else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        measure(*sys.argv[2:])
    else:
        raise SystemExit(main())
