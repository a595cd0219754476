"""Where the results of a verification lie: a folder for each comparison, so that several lie side by side."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs.verification.page import write_page
from jobs.verification.sides import Side, describe
from manifests.errors import UsageError
from storage.paths import folder_name

FOLDER, FACTS_NAME, PAGE_NAME = "verify", "verify.json", "verify.html"
_WORK = ".partial"  # one is enough: whoever works there holds the lock of the output folder


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """An empty folder below `out`, gone at the end unless `publish` renamed it.

    UsageError where there can be none. Raw frames fill disks: what a killed verification left goes first.
    """
    folder = out / FOLDER / _WORK
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"no folder to work in ({error.strerror}): {folder}", hint="give another folder with `--out`"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def results_folder(reference: Side, candidate: Side, *, prompts: str) -> Path:
    """Below the output folder: the same for the same comparison, whatever number of clips it takes."""
    title = f"{describe(candidate)} against {describe(reference)} on {Path(prompts).name}"
    sides = [(side.model, side.revision, side.lora, side.preset) for side in (candidate, reference)]
    return Path(FOLDER, folder_name(title, key=json.dumps([*sides, prompts])))


def publish(work: Path, final: Path, *, facts: Mapping[str, Any]) -> None:
    """Clips, page and facts take the place of what the same comparison left last time. Raises OSError."""
    text = json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False)
    (work / FACTS_NAME).write_text(text + "\n", encoding="utf-8")
    write_page(facts, work / PAGE_NAME)
    if final.exists():
        shutil.rmtree(final)
    work.rename(final)
