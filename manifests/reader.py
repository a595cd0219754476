"""From Parquet to a table of jobs: every default filled in, every wrong row set aside with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manifests.columns import check_type
from manifests.errors import ManifestError, MissingColumn, UsageError
from manifests.identity import derived_ids, derived_seeds, fingerprints, require_unique
from manifests.model_spec import FindSpec
from manifests.names import RULES, Layout, file_layout
from manifests.rows import Rows
from manifests.settings import ReadSettings
from manifests.sources import Part, open_parts
from manifests.table import JOBS_SCHEMA, REJECTED_SCHEMA
from manifests.validate import Checked, Models, preset_complaint, validate


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a manifest says. jobs: JOBS_SCHEMA, rejected: REJECTED_SCHEMA, both in the manifest's order.
    notes: sentences about whole columns."""

    jobs: pa.Table
    rejected: pa.Table
    notes: tuple[str, ...]


def read_manifest(source: str, *, settings: ReadSettings, model_spec: FindSpec) -> Reading:
    """Read and validate a file, a folder or a glob of Parquet, batch by batch.

    model_spec raises ModelError for a model it does not know: of the default model that goes to the
    caller, of a row's it rejects the row. Raises ManifestError when nothing of the manifest may run.
    """
    return read_parts(open_parts(source), settings=settings, model_spec=model_spec)


def read_parts(parts: Sequence[Part], *, settings: ReadSettings, model_spec: FindSpec) -> Reading:
    """read_manifest for parts that are already open; a part without rows may have any columns."""
    _require_usable(settings)
    models = Models(model_spec, default=settings.model)
    layouts = {
        part.file: _checked_layout(part, declared_tags=settings.tags) for part in parts if part.num_rows
    }
    _require_same_columns(layouts)
    checked = [
        validate(rows, tags=layouts[rows.file].tags, models=models, settings=settings)
        for part in parts
        if part.num_rows
        for rows in _rows_of(part)
    ]
    _require_unique_ids(checked)
    reading = Reading(
        jobs=pa.Table.from_batches(_named_jobs(checked), schema=JOBS_SCHEMA),
        rejected=pa.concat_tables([REJECTED_SCHEMA.empty_table(), *(one.rejected for one in checked)]),
        notes=tuple(_notes(parts, layouts, declared_tags=settings.tags)),
    )
    if settings.strict:
        _require_flawless(reading)
    return reading


def _require_usable(settings: ReadSettings) -> None:
    complaint = preset_complaint(settings.preset)
    if complaint:
        raise UsageError(f"preset `{settings.preset}`: {complaint}")
    known = sorted(settings.tags & RULES.keys())
    if known:
        raise UsageError(
            f"a known column cannot be a tag: `{known[0]}`", hint=f"leave out `--tag {known[0]}`"
        )


# ---- columns of the parts ---------------------------------------------------------------------------


def _checked_layout(part: Part, *, declared_tags: frozenset[str]) -> Layout:
    layout = file_layout(part.schema, file=part.file, declared_tags=declared_tags)
    for name in layout.known + layout.tags:
        kind = RULES[name].kind if name in RULES else "tag"
        check_type(name, part.schema.field(name).type, kind=kind, file=part.file)
    return layout


def _require_same_columns(layouts: Mapping[str, Layout]) -> None:
    columns = {file: {*layout.known, *layout.tags} for file, layout in layouts.items()}
    first = next(iter(columns), "")
    for file, names in columns.items():
        odd = sorted(names ^ columns[first])
        if odd:
            has, lacks = (file, first) if odd[0] in names else (first, file)
            raise MissingColumn(
                f"the parts differ in their columns: `{has}` has `{odd[0]}`, `{lacks}` has not",
                hint="give every part the same columns, or read them as separate manifests",
            )


def _notes(
    parts: Sequence[Part], layouts: Mapping[str, Layout], *, declared_tags: frozenset[str]
) -> Iterator[str]:
    for part in parts:
        if not part.num_rows:
            yield f"no rows in `{part.file}`"
    for name in sorted({name for layout in layouts.values() for name in layout.dropped}):
        yield f"column `{name}` left out: it is a pandas index"
    tags = {name for layout in layouts.values() for name in layout.tags}
    for name in sorted(declared_tags - tags) if layouts else ():
        yield f"no column `{name}`, which `--tag` declares"


def _rows_of(part: Part) -> Iterator[Rows]:
    first = 0
    for batch in part.batches():
        yield Rows(batch, file=part.file, first=first)
        first += batch.num_rows


# ---- names: ids, seeds, fingerprints ----------------------------------------------------------------


def _require_unique_ids(checked: Sequence[Checked]) -> None:
    named = ["file", "row", "id"]
    if checked:
        require_unique(
            [
                table
                for one in checked
                for table in (pa.Table.from_batches([one.jobs]).select(named), one.rejected.select(named))
            ]
        )


def _named_jobs(checked: Sequence[Checked]) -> Iterator[pa.RecordBatch]:
    """Batches of JOBS_SCHEMA: ids and seeds derived where there are none, then the fingerprint."""
    ids = _derived_ids(checked)
    begin = 0
    for one in checked:
        jobs, end = one.jobs, begin + one.jobs.column("id").null_count
        if end > begin:
            missing = jobs.column("id").is_null()
            jobs = _with(jobs, "id", pc.replace_with_mask(jobs.column("id"), missing, ids[begin:end]))
        begin = end
        if jobs.column("seed").null_count:
            missing = jobs.column("seed").is_null()
            seeds = pa.array(derived_seeds(jobs.column("id").filter(missing)))
            jobs = _with(jobs, "seed", pc.replace_with_mask(jobs.column("seed"), missing, seeds))
        columns = dict(zip(jobs.schema.names, jobs.columns, strict=True))
        columns["fingerprint"] = fingerprints(jobs)
        yield pa.RecordBatch.from_arrays([columns[name] for name in JOBS_SCHEMA.names], schema=JOBS_SCHEMA)


def _derived_ids(checked: Sequence[Checked]) -> pa.Array:
    """For every row without an id, in the manifest's order."""
    hashes = [one.hashes[_without_id(one.jobs)] for one in checked if one.hashes is not None]
    if not hashes:
        return pa.nulls(0, pa.string())
    explicit = pa.chunked_array([one.jobs.column("id").drop_null() for one in checked], pa.string())
    return derived_ids(np.concatenate(hashes), taken=explicit.combine_chunks())


def _without_id(jobs: pa.RecordBatch) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return jobs.column("id").is_null().to_numpy(zero_copy_only=False)


def _with(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index(name), batch.schema.field(name), column)


# ---- strict -----------------------------------------------------------------------------------------

_SHOWN = 3


def _require_flawless(reading: Reading) -> None:
    warned = reading.jobs.filter(reading.jobs["warning"].is_valid())
    total = reading.rejected.num_rows + warned.num_rows
    if not total:
        return
    lines = [describe_rejected(row) for row in reading.rejected.slice(0, _SHOWN).to_pylist()]
    for row in warned.slice(0, _SHOWN - len(lines)).select(["file", "row", "warning"]).to_pylist():
        lines.append(f"{row['file']} row {row['row']}: {row['warning']}")
    more = f"; and {total - len(lines)} more" if total > len(lines) else ""
    raise ManifestError(
        f"rows rejected: {reading.rejected.num_rows}, with a warning: {warned.num_rows}; "
        f"{'; '.join(lines)}{more}",
        hint="mend these rows, or run without `--strict`",
    )


def describe_rejected(row: Mapping[str, object]) -> str:
    """One row of REJECTED_SCHEMA as a sentence: where, what, why."""
    value = "" if row["value"] is None else f" `{row['value']}`"
    return f"{row['file']} row {row['row']}, {row['column']}{value}: {row['reason']}"
