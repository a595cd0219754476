"""What is told of a verification's clips: counts, shares, spreads, and which clip is the worst."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from jobs.verification.facts import Evidence, findings
from jobs.verification.pairs import Compared, Shown
from jobs.verification.sides import Rendered, Side
from pipeline.models.tiny.captions import Case
from pipeline.quality.compare import Difference
from pipeline.quality.gate import Limits
from pipeline.quality.oracle import Reading

TRUTH = Case(caption="a red square that moves right", colour="red", shape="square", motion="right")
FINE = Difference(psnr_db=40.0, ssim=0.9, flicker_ratio=1.0, num_black=0, num_frozen=0, num_frames=17)
FOLDER = Path("results")


def shown(*right: bool) -> Shown:
    reading = Reading(colour="red", shape="square", motion="still")
    return Shown(reading=reading, right=right)  # type: ignore[arg-type]


def compared(id: str, *, right: tuple[bool, ...] = (True, True, True), **changes: Any) -> Compared:
    return Compared(
        id=id,
        difference=replace(FINE, **changes),
        vmaf=90.0,
        reference=shown(True, True, True),
        candidate=shown(*right),
    )


def side(name: str, ids: str) -> Side:
    rows = [{"id": id, "prompt": id, "seed": 1, "width": 64, "height": 64} for id in ids]
    reading: Any = SimpleNamespace(jobs=pa.Table.from_pylist(rows))
    return Side(name=name, model="builtin", lora=None, preset=name, revision="r", reading=reading)


def rendered(name: str, ids: str) -> Rendered:
    summary: Any = None
    return Rendered(
        summary=summary,
        gpu_name="card",
        files={id: FOLDER / name / f"{id}.mp4" for id in ids},
        frames={id: Path(f"{id}.i420") for id in ids},
        reasons={},
        clip_s=1.0,
        skipped_frac=None,
    )


def found(*pairs: Compared, jobs: str, reference: str, candidate: str) -> dict[str, Any]:
    """jobs: ids of all prompts, one letter each. reference, candidate: of those that the side rendered."""
    return findings(
        Evidence(
            reference=side("exact", jobs),
            candidate=side("fast", jobs),
            rendered_reference=rendered("reference", reference),
            rendered_candidate=rendered("candidate", candidate),
            compared=pairs,
            truths=dict.fromkeys(jobs, TRUTH),
            limits=Limits(),
            vmaf_note=None,
            folder=FOLDER,
        )
    )


def test_the_worst_clips_are_missing_then_broken_then_lost_then_unlike() -> None:
    facts = found(
        compared("a", psnr_db=50.0),
        compared("b", psnr_db=30.0),
        compared("c", psnr_db=45.0, right=(True, False, True)),
        compared("d", psnr_db=46.0, num_frozen=17),
        compared("e", psnr_db=47.0, num_black=2),
        jobs="abcdefgh",
        reference="abcdef",
        candidate="abcdeg",
    )
    assert [clip["id"] for clip in facts["clips"]] == ["f", "d", "e", "c", "b", "a", "g", "h"]
    by_id = {clip["id"]: clip for clip in facts["clips"]}
    assert [id for id, clip in by_id.items() if clip["is_missing"]] == ["f"]
    assert [id for id, clip in by_id.items() if clip["is_lost"]] == ["c"]
    assert [(by_id[id]["num_black"], by_id[id]["num_frozen"]) for id in "de"] == [(0, 17), (2, 0)]
    assert (by_id["a"]["vmaf"], by_id["f"]["vmaf"]) == (90.0, None)
    assert (by_id["f"]["reference"]["file"], by_id["f"]["candidate"]["file"]) == ("reference/f.mp4", None)


def test_each_count_is_of_its_own_kind() -> None:
    facts = found(
        compared("a", num_black=1),
        compared("b", num_frozen=17),
        compared("c", num_frozen=17),
        jobs="abcdefghi",
        reference="abcdefg",
        candidate="abc",
    )
    names = ("num_clips", "num_black", "num_frozen", "num_missing", "num_left_out")
    assert [facts[name] for name in names] == [3, 1, 2, 4, 2]


def test_a_spread_is_of_its_own_figure() -> None:
    facts = found(
        compared("a", psnr_db=30.0, ssim=0.7, flicker_ratio=1.1),
        compared("b", psnr_db=31.0, ssim=0.8, flicker_ratio=1.3),
        compared("c", psnr_db=35.0, ssim=0.9, flicker_ratio=1.8),
        jobs="abc",
        reference="abc",
        candidate="abc",
    )
    assert facts["psnr_db"] == {"median": 31.0, "least": 30.0, "most": 35.0}
    assert facts["ssim"] == {"median": 0.8, "least": 0.7, "most": 0.9}
    assert facts["flicker_ratio"] == {"median": 1.3, "least": 1.1, "most": 1.8}
    assert facts["vmaf"] == {"median": 90.0, "least": 90.0, "most": 90.0}


def test_each_aspect_is_counted_by_itself_and_all_three_together() -> None:
    facts = found(
        compared("a", right=(False, True, True)),
        compared("b", right=(True, False, True)),
        compared("c", right=(True, False, True)),
        compared("d"),
        jobs="abcd",
        reference="abcd",
        candidate="abcd",
    )
    shares = {aspect: values["candidate_frac"] for aspect, values in facts["adherence"].items()}
    assert shares == {"colour": 0.75, "shape": 0.5, "motion": 1.0, "all three": 0.25}
