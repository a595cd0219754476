"""From a manifest to a plan: the path that `plan` and `run` share. Writes nothing, uses no device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from jobs.aliases import read_aliases
from jobs.config import Settings
from jobs.models import Models
from manifests.errors import UsageError
from manifests.history import History
from manifests.job import Bucket, Job
from manifests.planner import Plan, plan
from manifests.reader import Reading, read_manifest, read_parts
from manifests.settings import ReadSettings
from manifests.sources import Part
from manifests.table import bucket_from_row, job_from_row
from pipeline.config import NUMERICS
from storage.ledger import Ledger
from storage.paths import clip_name, list_clips
from storage.video import VideoSettings, is_complete, read_metadata

MAX_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What of the manifest to run. refresh: of `model`, `numerics`."""

    limit: int | None = None
    select: tuple[str, ...] = ()
    refresh: frozenset[str] = frozenset()


def read(manifest: str, *, settings: Settings) -> tuple[Reading, Models]:
    """Read and validate; ManifestError or ModelError before anything is made."""
    models = find_models(settings)
    return read_manifest(manifest, settings=read_settings(settings), model_spec=models.spec), models


def read_bucket(
    *,
    settings: Settings,
    size: str | None,
    num_frames: int | None,
    steps: int | None,
    guidance_scale: float | None,
) -> tuple[Bucket, Models]:
    """The bucket that a row of these settings would be in; what is None is the model's default.

    Raises UsageError as the row would be rejected.
    """
    models = find_models(settings)
    flags = {
        "resolution": ("--size", size),
        "num_frames": ("--frames", num_frames),
        "steps": ("--steps", steps),
        "guidance_scale": ("--guidance-scale", guidance_scale),
    }
    given = {name: [value] for name, (_, value) in flags.items() if value is not None}
    row = pa.table({"prompt": ["probe"], **given})
    part = Part(file="", schema=row.schema, num_rows=1, batches=lambda: iter(row.to_batches()))
    # A size that is rendered larger and cropped is as good as any here.
    lenient = replace(read_settings(settings), strict=False, tags=frozenset())
    reading = read_parts([part], settings=lenient, model_spec=models.spec)
    for wrong in reading.rejected.to_pylist():
        flag, value = flags.get(wrong["column"], ("the model's default size", wrong["value"]))
        raise UsageError(f"{flag}: {value}: {wrong['reason']}")
    (job,) = reading.jobs.to_pylist()
    return bucket_from_row(job), models


def find_models(settings: Settings) -> Models:
    """The models that names stand for here. Raises UsageError, LedgerError."""
    ledger = Ledger(settings.ledger)
    return Models(
        aliases=read_aliases(settings),
        pinned=ledger.pinned_revision if ledger.exists() else lambda name: None,
    )


def read_settings(settings: Settings) -> ReadSettings:
    """What of the settings the reader must know."""
    return ReadSettings(
        model=settings.model,
        preset=settings.preset,
        crf=settings.crf,
        encoder_preset=settings.encoder_preset,
        strict=settings.strict,
        tags=frozenset(settings.tags),
    )


@dataclass(frozen=True, kw_only=True)
class Planned:
    """found: file names of whole clips that no row of the ledger knows. bucket_s: median device
    seconds a slot of a batch by bucket key, from earlier runs. earlier_tries: by id and fingerprint."""

    plan: Plan
    found: frozenset[str]
    earlier_tries: Mapping[tuple[str, str], int]
    bucket_s: Mapping[str, float]


def plan_reading(
    reading: Reading,
    *,
    models: Models,
    settings: Settings,
    selection: Selection,
    forget_failures: bool = False,
) -> Planned:
    """The plan against what this ledger and this output folder already hold.

    forget_failures: count tries from the start, as `retry` does.
    """
    history, found = _history(reading.jobs, settings=settings)
    if forget_failures:
        history = replace(history, failures=_FAILURES.empty_table())
    made = plan(
        reading,
        history=history,
        model_spec=models.spec,
        refresh=selection.refresh,
        numerics=NUMERICS,
        limit=selection.limit,
        select=selection.select,
        max_attempts=MAX_ATTEMPTS,
    )
    made = replace(made, notes=(*made.notes, *models.streaming_notes()))
    ids, fingerprints, numbers = (
        history.failures[name].to_pylist() for name in ("id", "fingerprint", "number")
    )
    ledger = Ledger(settings.ledger)
    return Planned(
        plan=made,
        found=frozenset(found["file"].to_pylist()),
        earlier_tries=dict(zip(zip(ids, fingerprints, strict=True), numbers, strict=True)),
        bucket_s=ledger.bucket_times() if ledger.exists() else {},
    )


def _history(jobs: pa.Table, *, settings: Settings) -> tuple[History, pa.Table]:
    """What the planner must know, and the clips found whole on disk that the ledger does not know."""
    ledger = Ledger(settings.ledger)
    on_disk = list_clips(settings.out)
    if not ledger.exists():
        found = _found(jobs, on_disk["file"], folder=settings.out)
        empty = History(
            clips=found,
            failures=_FAILURES.empty_table(),
            previous=lambda ids: jobs.slice(0, 0),
            caps={},
            probed={},
        )
        return empty, found
    clips = ledger.clips()
    found = _found(jobs, _not_in(on_disk["file"], clips["file"]), folder=settings.out)
    present = _present(clips, on_disk)
    clips = clips.drop_columns(["num_bytes"]).append_column("present", present)
    gpu_name = ledger.last_gpu_name()
    history = History(
        clips=pa.concat_tables([clips, found]),
        failures=ledger.failures(),
        previous=ledger.previous_settings,
        caps=ledger.caps(gpu_name=gpu_name, numerics=NUMERICS) if gpu_name else {},
        probed=ledger.probed_caps(gpu_name=gpu_name, numerics=NUMERICS) if gpu_name else {},
    )
    return history, found


def _present(clips: pa.Table, on_disk: pa.Table) -> pa.ChunkedArray:
    """Whether each clip's file is there, of the size that was recorded when it was verified."""
    place = pc.index_in(clips["file"].cast(pa.string()), value_set=on_disk["file"].combine_chunks())
    sizes = on_disk["num_bytes"].take(place)
    return pc.fill_null(pc.equal(sizes, clips["num_bytes"]), False)


def _not_in(names: pa.ChunkedArray, known: pa.ChunkedArray) -> pa.ChunkedArray:
    return names.filter(pc.invert(pc.is_in(names, value_set=known.combine_chunks())))


_FAILURES = pa.schema(
    [("id", pa.string()), ("fingerprint", pa.string()), ("number", pa.int32()), ("reason", pa.string())]
)
_CLIPS = pa.schema(
    [
        ("id", pa.string()),
        ("fingerprint", pa.string()),
        ("file", pa.string()),
        ("model_revision", pa.string()),
        ("numerics", pa.string()),
        ("present", pa.bool_()),
    ]
)


def _found(jobs: pa.Table, names: pa.ChunkedArray, *, folder: Path) -> pa.Table:
    """Whole clips of these jobs that no ledger row knows: a run was killed between rename and record."""
    wanted = set(names.to_pylist())
    if not wanted:
        return _CLIPS.empty_table()
    candidates = jobs.filter(pa.array(_have_names(jobs, wanted)))
    with ThreadPoolExecutor(4) as pool:
        whole = list(pool.map(partial(_is_whole, folder=folder), map(job_from_row, candidates.to_pylist())))
    found = candidates.filter(pa.array(whole, type=pa.bool_()))
    files = [clip_name(*pair) for pair in _identities(found)]
    return pa.table(
        {
            "id": found["id"],
            "fingerprint": found["fingerprint"],
            "file": pa.array(files, type=pa.string()),
            "model_revision": pa.nulls(found.num_rows, pa.string()),
            "numerics": pa.nulls(found.num_rows, pa.string()),
            "present": pa.array([True] * found.num_rows, type=pa.bool_()),
        },
        schema=_CLIPS,
    )


def _identities(jobs: pa.Table) -> Iterator[tuple[str, str]]:
    return zip(jobs["id"].to_pylist(), jobs["fingerprint"].to_pylist(), strict=True)


def _have_names(jobs: pa.Table, wanted: set[str]) -> list[bool]:
    return [clip_name(id, fingerprint) in wanted for id, fingerprint in _identities(jobs)]


def _is_whole(job: Job, *, folder: Path) -> bool:
    path = folder / clip_name(job.id, job.fingerprint)
    try:
        metadata = read_metadata(path)
    except OSError:
        return False
    if metadata is None or (metadata.id, metadata.fingerprint) != (job.id, job.fingerprint):
        return False
    return is_complete(path, settings=VideoSettings.of(job))
