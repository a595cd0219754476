"""Manifests for people: an annotated example, and CSV or JSON lines turned into Parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from manifests.arrays import CHUNK_ROWS
from manifests.columns import PRICE
from manifests.errors import UnreadableManifest, UsageError
from manifests.model_spec import FindSpec
from manifests.names import RULES
from manifests.reader import Reading, read_parts
from manifests.settings import ReadSettings
from manifests.sources import Part, naming

_EXAMPLE = pa.table(
    {
        "id": ["kite-001", "kite-002", None],
        "prompt": [
            "a red kite over a slate sea at dusk, slow pan",
            "the same kite from below, sun behind it",
            "a paper boat in a gutter after rain, close up",
        ],
        "negative_prompt": pa.array([None, "text, watermark", None], pa.string()),
        # Small enough for the built-in model, so that the example can be tried as it is.
        "width": pa.array([128, 96, None], pa.int32()),
        "height": pa.array([96, 128, None], pa.int32()),
        "duration": pa.array([2.125, None, None], pa.float64()),
        "num_frames": pa.array([None, 33, None], pa.int32()),
        "fps": pa.array([8.0, 23.976, None], pa.float64()),
        "seed": pa.array([42, 43, None], pa.int64()),
        "steps": pa.array([30, None, None], pa.int32()),
        "guidance_scale": pa.array([5.0, None, None], pa.float64()),
        "priority": pa.array([10, None, None], pa.int32()),
        "price": pa.array([Decimal("0.25"), Decimal("0.25"), None], PRICE),
        "customer": pa.array(["acme", "acme", "globex"], pa.string()),
    }
)


def template_text() -> str:
    """Every column with its type, default and meaning, one to a line, for `vgbatch manifest template`."""
    heads = [(rule.name, rule.type, rule.default) for rule in RULES.values()]
    name, type, default = (max(map(len, column)) for column in zip(*heads, strict=True))
    lines = [
        f"{rule.name:<{name}}  {rule.type:<{type}}  {rule.default:<{default}}  {rule.about}"
        for rule in RULES.values()
    ]
    head = f"{'column':<{name}}  {'type':<{type}}  {'default':<{default}}  meaning"
    last = "Any other column is a tag: kept with the clip, and usable in `vgbatch report --by`."
    return "\n".join([head, *lines, "", last, ""])


def template_facts() -> list[dict[str, str]]:
    """The same for a program: name, type, default and meaning of every column."""
    return [
        {"name": rule.name, "type": rule.type, "default": rule.default, "meaning": rule.about}
        for rule in RULES.values()
    ]


def write_template(path: str, *, overwrite: bool = False) -> str:
    """Write an example manifest whose fields carry their descriptions; returns template_text()."""
    schema = pa.schema(
        [field.with_metadata({"description": _description(field.name)}) for field in _EXAMPLE.schema]
    )
    with _new_file(path, overwrite=overwrite) as temporary:
        pq.write_table(_EXAMPLE.cast(schema), temporary)
    return template_text()


def _description(name: str) -> str:
    return RULES[name].about if name in RULES else "A tag: kept with the clip."


def convert_csv(
    source: str,
    target: str,
    *,
    settings: ReadSettings,
    model_spec: FindSpec,
    overwrite: bool = False,
) -> Reading:
    """Write a CSV file with a header line as Parquet, every row of it, right or wrong.

    An empty cell is null, `""` an empty text. Returns what `read_manifest` says of it, so that the caller
    can show what would be rejected; its rows count the records of source from 0. Nothing is written when
    the manifest as a whole cannot be used (ManifestError), and never over an existing file unless
    overwrite is set (UsageError).
    """
    return _convert(_csv_texts(source), source, target, settings, model_spec, overwrite)


def convert_jsonl(
    source: str,
    target: str,
    *,
    settings: ReadSettings,
    model_spec: FindSpec,
    overwrite: bool = False,
) -> Reading:
    """As convert_csv, from one JSON object to a line. Numbers keep their digits; a missing key is null."""
    return _convert(_jsonl_texts(source), source, target, settings, model_spec, overwrite)


def _convert(
    texts: pa.Table,
    source: str,
    target: str,
    settings: ReadSettings,
    model_spec: FindSpec,
    overwrite: bool,
) -> Reading:
    names = texts.column_names
    columns = [_typed(name, column) for name, column in zip(names, texts.columns, strict=True)]
    table = pa.Table.from_arrays(columns, names=names)
    part = Part(file=source, schema=table.schema, num_rows=texts.num_rows, batches=lambda: _in_chunks(table))
    with _new_file(target, overwrite=overwrite) as temporary:
        reading = read_parts([part], settings=settings, model_spec=model_spec)
        pq.write_table(table, temporary)
    return reading


def _in_chunks(table: pa.Table) -> Iterator[pa.RecordBatch]:
    yield from table.to_batches(max_chunksize=CHUNK_ROWS)


# ---- reading text ------------------------------------------------------------------------------------


def _csv_texts(source: str) -> pa.Table:
    multiline = pa_csv.ParseOptions(newlines_in_values=True)
    with naming(source, kind="CSV"):
        names = pa_csv.open_csv(source, parse_options=multiline).schema.names
        as_text = pa_csv.ConvertOptions(
            column_types={name: pa.string() for name in names},
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            check_utf8=False,
        )
        return pa_csv.read_csv(source, parse_options=multiline, convert_options=as_text)


def _jsonl_texts(source: str) -> pa.Table:
    columns: dict[str, list[bytes | None]] = {}
    num_records = 0
    with naming(source, kind="JSON lines"), Path(source).open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            record = _record(line, where=f"{source} line {number}")
            for name in record:
                if name not in columns:
                    columns[name] = [None] * num_records
            for name, values in columns.items():
                values.append(record.get(name))
            num_records += 1
        return pa.table({name: _unchecked_texts(values) for name, values in columns.items()})


def _unchecked_texts(values: list[bytes | None]) -> pa.Array:
    as_text = pc.CastOptions(target_type=pa.string(), allow_invalid_utf8=True)
    return pc.cast(pa.array(values, pa.binary()), options=as_text)


def _record(line: bytes, *, where: str) -> dict[str, bytes | None]:
    """One line's values as text. Numbers stay as written: a float in between would lose digits."""
    try:
        # Bytes that are not UTF-8 come through, for the row to be rejected like any other.
        text = line.decode("utf-8-sig", "surrogateescape")
        record = json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except ValueError as error:
        raise UnreadableManifest(f"not JSON ({error}): {where}") from error
    if not isinstance(record, dict):
        raise UnreadableManifest(f"not a JSON object: {where}", hint="write one `{...}` to a line")
    return {name: _json_text(value, where=f"{where}, `{name}`") for name, value in record.items()}


def _json_text(value: object, *, where: str) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    raise UnreadableManifest(f"a list or an object as value: {where}", hint="write text, a number or null")


_TYPES = {"whole": pa.int64(), "real": pa.float64(), "duration": pa.float64(), "price": PRICE}


def _typed(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column in the type of its rule; as text when a value does not fit, for that row to be rejected
    with the text as written and no other to be lost."""
    kind = RULES[name].kind if name in RULES else "tag"
    if kind not in _TYPES:
        return column
    try:
        return pc.utf8_trim_whitespace(column).cast(_TYPES[kind])
    except pa.ArrowInvalid:
        return column


# ---- writing -----------------------------------------------------------------------------------------


@contextmanager
def _new_file(target: str, *, overwrite: bool) -> Iterator[str]:
    """A temporary file beside target that takes its name when all went well."""
    path = Path(target)
    if path.suffix != ".parquet":
        raise UsageError(
            f"not the name of a Parquet file: {target}", hint=f"name it `{path.with_suffix('.parquet')}`"
        )
    if path.exists() and not overwrite:
        raise UsageError(f"already there: {target}", hint="choose another name, or pass `--overwrite`")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield str(temporary)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"cannot be written ({error.strerror or error}): {target}") from error
    finally:
        temporary.unlink(missing_ok=True)
