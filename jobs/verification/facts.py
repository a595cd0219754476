"""What a verification found, as JSON-ready data: of all clips together, and of each, the worst one first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jobs.verification.pairs import ASPECTS, Compared, Shown
from jobs.verification.sides import Rendered, Side
from pipeline.models.tiny.captions import Case
from pipeline.quality.gate import Check, Limits, has_passed, judge, verdict
from pipeline.quality.paired import PairedShares, paired_shares

ALL_THREE = "all three"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that was rendered and compared. reference, candidate: in the order of their names below.

    compared: of clips that both sides rendered. truths: what clips must show, by id, where that is known.
    vmaf_note: why there is no VMAF, if so. folder: what names of files are relative to.
    """

    reference: Side
    candidate: Side
    rendered_reference: Rendered
    rendered_candidate: Rendered
    compared: Sequence[Compared]
    truths: Mapping[str, Case]
    limits: Limits
    vmaf_note: str | None
    folder: Path

    @property
    def num_missing(self) -> int:
        """Clips that only the reference rendered."""
        ids = set(self.candidate.jobs["id"].to_pylist()) - self.rendered_candidate.frames.keys()
        return len(ids & self.rendered_reference.frames.keys())

    @property
    def num_left_out(self) -> int:
        """Prompts without a clip of the reference: nothing to compare with."""
        return len(set(self.candidate.jobs["id"].to_pylist()) - self.rendered_reference.frames.keys())


def findings(evidence: Evidence) -> dict[str, Any]:
    """The verdict and its reasons. Shares (`_frac`) are of 1; None stands for what does not apply here."""
    adherence = _adherence(evidence.compared)
    differences = [one.difference for one in evidence.compared]
    checks = judge(
        differences,
        num_missing=evidence.num_missing,
        adherence=adherence.get(ALL_THREE),
        limits=evidence.limits,
    )
    return {
        "passed": has_passed(checks),
        "verdict": verdict(checks),
        "checks": [_check_facts(check) for check in checks],
        "reference": _side_facts(evidence.reference, evidence.rendered_reference),
        "candidate": _side_facts(evidence.candidate, evidence.rendered_candidate),
        "num_clips": len(evidence.compared),
        "num_left_out": evidence.num_left_out,
        "num_missing": evidence.num_missing,
        "num_black": sum(one.is_black for one in differences),
        "num_frozen": sum(one.is_frozen for one in differences),
        "num_identical": sum(one.psnr_db == math.inf for one in differences),
        "psnr_db": _spread([one.psnr_db for one in differences]),
        "ssim": _spread([one.ssim for one in differences]),
        "vmaf": _spread([one.vmaf for one in evidence.compared]),
        "vmaf_note": evidence.vmaf_note,
        "flicker_ratio": _spread([one.flicker_ratio for one in differences]),
        "adherence": {aspect: asdict(shares) for aspect, shares in adherence.items()} or None,
        "clips": _clips(evidence),
    }


def _adherence(compared: Sequence[Compared]) -> dict[str, PairedShares]:
    """By aspect, and for all three at once; empty without a known truth."""
    shown = [(one.reference, one.candidate) for one in compared if one.reference and one.candidate]
    if not shown:
        return {}
    aspects = {
        aspect: paired_shares(
            [reference.right[index] for reference, _ in shown],
            [candidate.right[index] for _, candidate in shown],
        )
        for index, aspect in enumerate(ASPECTS)
    }
    together = paired_shares(
        [reference.all_right for reference, _ in shown], [candidate.all_right for _, candidate in shown]
    )
    return {**aspects, ALL_THREE: together}


def _check_facts(check: Check) -> dict[str, Any]:
    return {**asdict(check), "value": _finite(check.value)}


def _side_facts(side: Side, rendered: Rendered) -> dict[str, Any]:
    return {
        "model": side.model,
        "revision": side.revision,
        "lora": side.lora,
        "preset": side.preset,
        "clip_s": rendered.clip_s,
        "skipped_frac": rendered.skipped_frac,
    }


def _spread(values: Sequence[float | None]) -> dict[str, float | None] | None:
    """Median and extremes of what is known. JSON knows no infinity: there None, of equal clips."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    figures = {"median": median(known), "least": min(known), "most": max(known)}
    return {name: _finite(value) for name, value in figures.items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# ---- clips ------------------------------------------------------------------------------------------


def _clips(evidence: Evidence) -> list[dict[str, Any]]:
    """The worst first: without a clip, black, frozen, showing no longer what it should, then by likeness."""
    compared = {one.id: one for one in evidence.compared}
    rows = evidence.candidate.jobs.select(["id", "prompt", "seed", "width", "height"]).to_pylist()
    clips = [_clip(row, compared.get(row["id"]), evidence) for row in rows]
    return sorted(clips, key=_badness, reverse=True)


def _clip(row: Mapping[str, Any], one: Compared | None, evidence: Evidence) -> dict[str, Any]:
    id = row["id"]
    truth = evidence.truths.get(id)
    difference = one.difference if one else None
    reference, candidate = evidence.rendered_reference, evidence.rendered_candidate
    return {
        **row,
        "truth": [getattr(truth, aspect) for aspect in ASPECTS] if truth else None,
        "reference": _clip_side(id, reference, one.reference if one else None, evidence.folder),
        "candidate": _clip_side(id, candidate, one.candidate if one else None, evidence.folder),
        "is_missing": id in reference.frames and id not in candidate.frames,
        "is_lost": one is not None and one.is_lost,
        "is_identical": difference is not None and difference.psnr_db == math.inf,
        "is_black": difference is not None and difference.is_black,
        "is_frozen": difference is not None and difference.is_frozen,
        "num_black": difference.num_black if difference else None,
        "num_frozen": difference.num_frozen if difference else None,
        "psnr_db": _finite(difference.psnr_db) if difference else None,
        "ssim": difference.ssim if difference else None,
        "vmaf": one.vmaf if one else None,
        "flicker_ratio": difference.flicker_ratio if difference else None,
    }


def _clip_side(id: str, rendered: Rendered, shown: Shown | None, folder: Path) -> dict[str, Any]:
    file = rendered.files.get(id)
    return {
        "file": None if file is None else file.relative_to(folder).as_posix(),
        "reason": rendered.reasons.get(id),
        "shows": [getattr(shown.reading, aspect) for aspect in ASPECTS] if shown else None,
    }


def _badness(clip: Mapping[str, Any]) -> tuple[float, ...]:
    """Larger is worse."""
    likeness = clip["psnr_db"]
    return (
        clip["is_missing"],
        clip["is_black"] or clip["is_frozen"],
        clip["is_lost"],
        -math.inf if likeness is None else -likeness,
    )
