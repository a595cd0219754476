"""`vgbatch verify`: the same prompts and noise, rendered by two sides, and a gate on what differs.

Both sides are runs with folders and ledgers of their own, so what renders, retries and encodes them is what
does it every night. Their frames are kept as the engine gave them, before any encoder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from jobs.config import Settings
from jobs.lock import run_lock
from jobs.models import Models
from jobs.prepare import find_models
from jobs.runner import choose_devices, new_run_id
from jobs.terminal import line
from jobs.verification.facts import Evidence, findings
from jobs.verification.folder import PAGE_NAME, publish, results_folder, work_folder
from jobs.verification.pairs import KeptClip, Pair, compare_pairs
from jobs.verification.sides import Rendered, Side, describe, read_side, render_side
from jobs.views import rejected_facts, show_rejected
from jobs.worker import RendererFactory
from manifests.errors import LedgerError, UsageError
from manifests.job import Weights
from manifests.presets import EXACT, PRESETS, TURBO
from manifests.sources import naming, open_parts
from manifests.wording import counted
from pipeline.config import NUMERICS
from pipeline.models.lora_files import without_few_step
from pipeline.models.tiny.captions import Case
from pipeline.quality.gate import limits_of
from pipeline.quality.prompts import (
    DEFAULT_CAPTION_CLIPS,
    Prompt,
    held_out_captions,
    understands_captions,
    varied_prompts,
)
from storage.filesystem import require_writable
from storage.ledger import Ledger
from storage.rows import VerificationRow
from storage.vmaf import LEAST_SIDE, has_vmaf


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What came of it. exit_code: 0 passed and kept, 3 not, 130 or 143 stopped by a signal. facts:
    JSON-ready; when stopped, none but `passed` and `stopped_by`. kept: whether there is a verdict, with its
    page and its row in the ledger; on any other nothing may rest. page: None where there is none.
    """

    passed: bool
    exit_code: int
    facts: dict[str, Any]
    kept: bool = True
    page: Path | None = None


def verify(
    settings: Settings,
    *,
    lora: str | None = None,
    against: str = EXACT,
    against_model: str | None = None,
    manifest: str | None = None,
    num_clips: int | None = None,
    console: Console,
    command: str = "vgbatch verify",
    factory: RendererFactory | None = None,
) -> Verification:
    """Compare settings.model in settings.preset with against_model, or itself, in the preset `against`.

    lora: of both sides; for `turbo` it is the few-step one, which the guided reference goes without.
    manifest: a prompt set of our own unless given. num_clips: its first ones. factory: makes a worker's
    renderer; the engine unless given. Takes the lock of settings.out and settings.ledger, and records the
    verdict there.
    Raises UsageError, ModelError, ManifestError, LedgerError, Busy, RunError.
    """
    _require_preset(against)
    choose_devices(settings)  # before anything is compared: its sides are runs, which would ask as well
    verification_id = new_run_id()
    require_writable(settings.out)
    require_writable(settings.ledger.parent)
    with run_lock(out=settings.out, ledger=settings.ledger, run_id=verification_id):
        ledger = Ledger(settings.ledger)
        ledger.create()
        models = find_models(settings)
        prompts = _find_prompts(settings, manifest, num_clips, models=models)
        is_few_step = settings.preset == TURBO and against != TURBO
        reference, candidate = _read_sides(
            prompts,
            reference=(
                against_model or settings.model,
                without_few_step(lora) if lora is not None and is_few_step else lora,
                against,
            ),
            candidate=(settings.model, lora, settings.preset),
            settings=settings,
            models=models,
            console=console,
        )
        if is_few_step and reference.revision == candidate.revision:
            raise UsageError(
                f"nothing to compare with: {candidate.model} is a few-step checkpoint in every preset",
                hint="`--against-model MODEL` names one that takes many steps",
            )
        for text in (*_left_out(prompts), *models.announcements()):
            line(console, text)
        session = _Session(
            settings=settings,
            models=models,
            console=console,
            command=command,
            factory=factory,
            prompts=prompts,
        )
        line(console, _task(reference, candidate, prompts=prompts, is_cut=num_clips is not None))
        with work_folder(settings.out) as work:
            try:
                facts = session.compare(reference, candidate, folder=work)
            except _Stopped as stopped:
                facts = {"passed": False, "stopped_by": stopped.reason}
                return Verification(passed=False, exit_code=stopped.exit_code, facts=facts, kept=False)
            facts = {
                "verification_id": verification_id,
                "verified_at": datetime.now(UTC).isoformat(),
                "prompts": prompts.name,
                "numerics": NUMERICS,
                "folder": results_folder(reference, candidate, prompts=prompts.name).as_posix(),
                **facts,
            }
            kept = _keep(facts, work=work, out=settings.out, ledger=ledger, console=console)
        return Verification(
            passed=facts["passed"],
            exit_code=0 if facts["passed"] and kept else 3,
            facts=facts,
            kept=kept,
            page=settings.out / facts["folder"] / PAGE_NAME if facts["folder"] else None,
        )


def _require_preset(name: str) -> None:
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"--against: {name}", hint=f"valid: {', '.join(PRESETS)}{meant}")


# ---- prompts and sides ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Prompts:
    """rows: as of a manifest. truths: what clips must show, by id, where that is known."""

    name: str
    rows: pa.Table
    truths: Mapping[str, Case]


def _find_prompts(
    settings: Settings, manifest: str | None, num_clips: int | None, *, models: Models
) -> _Prompts:
    if manifest is not None:
        return _Prompts(name=manifest, rows=_manifest_rows(manifest, num_clips), truths={})
    weights = Weights(settings.model)
    models.spec(weights)  # or the error that says why there is no such model
    if not understands_captions(models.sources()[weights].folder):
        return _prompts_of(varied_prompts(num_clips), name="varied prompts")
    captions = held_out_captions(num_clips or DEFAULT_CAPTION_CLIPS)
    return _prompts_of(captions, name="held-out captions")


def _prompts_of(prompts: Sequence[Prompt], *, name: str) -> _Prompts:
    rows = pa.table(
        {
            "id": [prompt.id for prompt in prompts],
            "prompt": [prompt.text for prompt in prompts],
            "seed": [prompt.seed for prompt in prompts],
        }
    )
    truths = {prompt.id: prompt.truth for prompt in prompts if prompt.truth is not None}
    return _Prompts(name=name, rows=rows, truths=truths)


def _left_out(prompts: _Prompts) -> Iterator[str]:
    if "lora" in prompts.rows.column_names and prompts.rows["lora"].null_count < prompts.rows.num_rows:
        yield f"column lora of {prompts.name} is left out: `--lora` names those of all rows"


def _manifest_rows(manifest: str, num_clips: int | None) -> pa.Table:
    parts = open_parts(manifest)
    tables = [part.schema.empty_table() for part in parts]
    num_rows = 0
    for batch in chain.from_iterable(part.batches() for part in parts):
        tables.append(pa.Table.from_batches([batch]))
        num_rows += batch.num_rows
        if num_clips is not None and num_rows >= num_clips:
            break
    with naming(manifest):
        rows = pa.concat_tables(tables, promote_options="permissive")
    return rows.slice(0, num_clips)


def _read_sides(
    prompts: _Prompts,
    *,
    reference: tuple[str, str | None, str],
    candidate: tuple[str, str | None, str],
    settings: Settings,
    models: Models,
    console: Console,
) -> tuple[Side, Side]:
    """reference, candidate: model, LoRA and preset."""

    def read(rows: pa.Table, name: str, side: tuple[str, str | None, str], numbers: pa.Array) -> Side:
        model, lora, preset = side
        found = read_side(
            rows,
            name=name,
            model=model,
            lora=lora,
            preset=preset,
            file=prompts.name,
            settings=settings,
            models=models,
        )
        rejected = rejected_facts(found.reading.rejected)
        show_rejected([{**row, "row": numbers[row["row"]].as_py()} for row in rejected], console)
        if not found.jobs.num_rows:
            raise UsageError(
                f"nothing to compare: the {name} cannot render any row of {prompts.name}",
                hint="mend the rows named above, or leave the manifest out for prompts of our own",
            )
        return found

    first = read(prompts.rows, "reference", reference, pa.array(range(prompts.rows.num_rows)))
    # Ids and seeds are a hash of what a row says where it names none: both sides get the same.
    rows = prompts.rows.take(first.jobs["row"])
    rows = rows.drop_columns([name for name in ("id", "seed") if name in rows.column_names])
    rows = rows.append_column("id", first.jobs["id"]).append_column("seed", first.jobs["seed"])
    return first, read(rows, "candidate", candidate, first.jobs["row"])


def _task(reference: Side, candidate: Side, *, prompts: _Prompts, is_cut: bool) -> str:
    """What is about to be rendered, said before it is."""
    clips = counted(reference.jobs.num_rows + candidate.jobs.num_rows, "clip")
    fewer = "" if is_cut else "; `--clips` compares fewer"
    return f"{describe(candidate)} against {describe(reference)}: {clips} of {prompts.name} to render{fewer}"


# ---- rendering and comparing ------------------------------------------------------------------------


class _Stopped(Exception):
    """A side was not rendered to its end: by a signal, or as its folder or ledger is full or gone."""

    def __init__(self, reason: str, *, exit_code: int) -> None:
        super().__init__(reason)
        self.reason, self.exit_code = reason, exit_code


@dataclass(frozen=True, kw_only=True)
class _Session:
    """What both sides are rendered and compared with."""

    settings: Settings
    models: Models
    console: Console
    command: str
    factory: RendererFactory | None
    prompts: _Prompts

    def compare(self, reference: Side, candidate: Side, *, folder: Path) -> dict[str, Any]:
        """The findings. Raises _Stopped. Frames are gone when it returns."""
        frames = folder / "frames"
        rendered = [self._render(side, folder=folder, frames=frames) for side in (reference, candidate)]
        found = self._findings(reference, candidate, *rendered, folder=folder)
        shutil.rmtree(frames)
        return found

    def _render(self, side: Side, *, folder: Path, frames: Path) -> Rendered:
        clips = counted(side.jobs.num_rows, "clip")
        line(self.console, f"{side.name}: {describe(side)}, {clips}")
        try:
            rendered = render_side(
                side,
                settings=self.settings,
                folder=folder / side.name,
                frames=frames / side.name,
                models=self.models,
                console=self.console,
                command=self.command,
                factory=self.factory,
            )
        except (LedgerError, UsageError, OSError) as error:
            # Of a folder that was made a moment ago: the disk is full or gone, as a run finds it midway.
            line(self.console, f"warning: {error}")
            raise _Stopped(f"no clip can be written to {folder / side.name}", exit_code=3) from error
        summary = rendered.summary
        if summary.stopped_by is not None:
            raise _Stopped(summary.stopped_by, exit_code=summary.exit_code)
        return rendered

    def _findings(
        self,
        reference: Side,
        candidate: Side,
        rendered_reference: Rendered,
        rendered_candidate: Rendered,
        *,
        folder: Path,
    ) -> dict[str, Any]:
        theirs, ours = _kept(reference, rendered_reference), _kept(candidate, rendered_candidate)
        both = [id for id in theirs if id in ours]
        vmaf_note = _vmaf_note([theirs[id] for id in both])
        pairs = [
            Pair(
                id=id,
                reference=theirs[id],
                candidate=ours[id],
                truth=self.prompts.truths.get(id),
                with_vmaf=vmaf_note is None,
            )
            for id in both
        ]
        line(self.console, f"comparing {counted(len(pairs), 'pair')} of clips")
        evidence = Evidence(
            reference=reference,
            candidate=candidate,
            rendered_reference=rendered_reference,
            rendered_candidate=rendered_candidate,
            compared=compare_pairs(pairs),
            truths=self.prompts.truths,
            limits=limits_of(
                candidate.preset,
                against=reference.preset,
                same_weights=candidate.revision == reference.revision,
            ),
            vmaf_note=vmaf_note,
            folder=folder,
        )
        return {"gpu_name": rendered_candidate.gpu_name, **findings(evidence)}


def _kept(side: Side, rendered: Rendered) -> dict[str, KeptClip]:
    columns = ["id", "width", "height", "num_frames"]
    return {
        id: KeptClip(path=rendered.frames[id], width=width, height=height, num_frames=num_frames)
        for id, width, height, num_frames in zip(
            *(side.jobs[name].to_pylist() for name in columns), strict=True
        )
        if id in rendered.frames
    }


def _vmaf_note(clips: Sequence[KeptClip]) -> str | None:
    """Why there is no VMAF; None where there is."""
    if not any(min(clip.width, clip.height) >= LEAST_SIDE for clip in clips):
        return f"VMAF says nothing of clips below {LEAST_SIDE}p"
    return None if has_vmaf() else "no VMAF: this ffmpeg has no libvmaf filter"


# ---- what is kept -----------------------------------------------------------------------------------


def _keep(facts: dict[str, Any], *, work: Path, out: Path, ledger: Ledger, console: Console) -> bool:
    """Whether page and ledger have it. Where not, that is said, and the verdict still is: it was paid for."""
    kept = True
    final = out / facts["folder"]
    try:
        publish(work, final, facts=facts)
    except OSError as error:
        line(console, f"warning: {final} cannot be written: {error.strerror}")
        facts["folder"], kept = None, False
    try:
        ledger.add_verification(_row(facts))
    except LedgerError as error:
        line(console, f"warning: {error.message}")
        kept = False
    return kept


def _row(facts: Mapping[str, Any]) -> VerificationRow:
    candidate, reference = facts["candidate"], facts["reference"]
    figures = {name: value for name, value in facts.items() if name != "clips"}
    return VerificationRow(
        verification_id=facts["verification_id"],
        model=candidate["model"],
        model_revision=candidate["revision"],
        lora=candidate["lora"],
        preset=candidate["preset"],
        reference_model=reference["model"],
        reference_revision=reference["revision"],
        reference_lora=reference["lora"],
        reference_preset=reference["preset"],
        numerics=facts["numerics"],
        gpu_name=facts["gpu_name"],
        num_clips=facts["num_clips"],
        passed=facts["passed"],
        result=json.dumps(figures, ensure_ascii=False, allow_nan=False),
        verified_at=datetime.fromisoformat(facts["verified_at"]),
    )
