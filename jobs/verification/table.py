"""What `vgbatch verify` prints for people; the facts are those of `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.terminal import line
from manifests.job import Weights
from manifests.wording import counted

# By name of the facts: what people call it, its unit, and with how many digits.
LIKENESS = {
    "psnr_db": ("PSNR", "dB", 2),
    "ssim": ("SSIM", "", 4),
    "vmaf": ("VMAF", "", 1),
    "flicker_ratio": ("flicker ratio", "", 3),
}
ADHERENCE = ("shows what it should", "reference", "candidate", "difference, points", "95 % interval")
SPREAD = ("likeness", "median", "least", "most")
GATE = ("gate", "measured", "limit", "")


def show_verification(facts: Mapping[str, Any], console: Console, *, page: Path | None) -> None:
    """facts, page: of a Verification."""
    if facts.get("stopped_by"):
        line(console, f"stopped by {facts['stopped_by']}: nothing is verified, the same command begins anew")
        return
    line(console, f"{headline(facts)}, on {facts['gpu_name']}")
    if facts["adherence"]:
        _show_table(ADHERENCE, adherence_cells(facts), console)
    if likeness := likeness_cells(facts):
        _show_table(SPREAD, likeness, console)
    _show_table(GATE, [check_cells(check) for check in facts["checks"]], console)
    for note in notes(facts):
        line(console, note)
    line(console, facts["verdict"])
    if page is not None:
        line(console, f"the clips side by side, worst first: {page}")


def headline(facts: Mapping[str, Any]) -> str:
    """Who is compared with whom, on what."""
    candidate, reference = (_side(facts[name]) for name in ("candidate", "reference"))
    clips = counted(facts["num_clips"], "clip")
    return f"{candidate} against {reference}: {clips} of {facts['prompts']}"


def _side(side: Mapping[str, Any]) -> str:
    return f"{Weights(side['model'], side['lora'])}, {side['preset']} ({side['revision'][:12]})"


def notes(facts: Mapping[str, Any]) -> list[str]:
    """What stands in no table."""
    found = [
        f"{check['name']} was not asked for: {check['note']}" for check in facts["checks"] if check["note"]
    ]
    if num_identical := facts["num_identical"]:
        found.append(f"{num_identical} of {facts['num_clips']} clips are equal to the last bit")
        preset = facts["candidate"]["preset"]
        if num_identical == facts["num_clips"] and preset != facts["reference"]["preset"]:
            found[-1] += f": preset {preset} changed nothing here"
    if facts["num_left_out"]:
        left_out = counted(facts["num_left_out"], "prompt")
        found.append(f"{left_out} left out: the reference has no clip of them")
    if facts["vmaf_note"]:
        found.append(facts["vmaf_note"])
    skipped_frac = facts["candidate"]["skipped_frac"]
    if skipped_frac:
        found.append(f"forwards of the transformer that the candidate left out: {skipped_frac:.1%}")
    times = [facts[name]["clip_s"] for name in ("reference", "candidate")]
    if all(times):
        found.append(f"seconds of a device for a clip: {times[0]:.3g} reference, {times[1]:.3g} candidate")
    return found


def _show_table(names: tuple[str, ...], rows: list[tuple[str, ...]], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def adherence_cells(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Under ADHERENCE."""
    return [
        (
            aspect,
            f"{shares['reference_frac']:.1%}",
            f"{shares['candidate_frac']:.1%}",
            _points(shares["difference_frac"]),
            f"{_points(shares['low_frac'])} to {_points(shares['high_frac'])}",
        )
        for aspect, shares in facts["adherence"].items()
    ]


def likeness_cells(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Under SPREAD, of what is known."""
    return [
        (label, *(figure(facts[name][column], unit, digits) for column in SPREAD[1:]))
        for name, (label, unit, digits) in LIKENESS.items()
        if facts[name]
    ]


def check_cells(check: Mapping[str, Any]) -> tuple[str, ...]:
    """Under GATE."""
    value, limit, unit = check["value"], check["limit"], check["unit"]
    if unit == "share":
        measured = "n/a" if value is None else f"{value * 100:.1f} points"
        allowed = "" if limit is None else f"{check['relation']} {limit * 100:g} points"
    else:
        # Only the PSNR of equal clips has no finite number.
        measured = "equal" if value is None else f"{value:.4g} {unit}".rstrip()
        allowed = "" if limit is None else f"{check['relation']} {limit:g} {unit}".rstrip()
    outcome = {True: "passed", False: "FAILED", None: "not asked"}[check["passed"]]
    return check["name"], measured, allowed, outcome


def _points(fraction: float) -> str:
    """`+0.5`: of a hundred."""
    return f"{fraction * 100:+.1f}"


def figure(value: float | None, unit: str, digits: int) -> str:
    """Only a PSNR of equal clips has no finite value."""
    return "equal" if value is None else f"{value:.{digits}f} {unit}".rstrip()
