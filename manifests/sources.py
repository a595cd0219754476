"""From what the user named to Parquet files that can be read, batch by batch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import glob, has_magic
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from manifests.arrays import CHUNK_ROWS
from manifests.errors import UnreadableManifest

_HINT = "check the path, or write the file again; nothing was run"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One file of a manifest. file: as shown in messages. batches: reads it anew at each call."""

    file: str
    schema: pa.Schema
    num_rows: int
    batches: Callable[[], Iterator[pa.RecordBatch]]


def open_parts(source: str) -> list[Part]:
    """A file, a folder (its *.parquet) or a glob, sorted by name. Raises UnreadableManifest."""
    return [_open_part(file) for file in _find_files(source)]


def is_url(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def _find_files(source: str) -> list[str]:
    if is_url(source):
        raise UnreadableManifest(f"not supported yet: {source}", hint="copy the manifest to a local path")
    path = Path(source)
    if path.is_dir():
        return _in_folder(path)
    if path.exists() or not has_magic(source):
        return [source]
    found = sorted(glob(source, recursive=True))
    if not found:
        raise UnreadableManifest(f"no file matches: {source}", hint="quote the glob, and check it with `ls`")
    return [file for name in found for file in (_in_folder(Path(name)) if Path(name).is_dir() else [name])]


def _in_folder(folder: Path) -> list[str]:
    with naming(str(folder)):
        files = sorted(str(path) for path in folder.glob("[!.]*.parquet") if path.is_file())
    if not files:
        raise UnreadableManifest(
            f"no *.parquet file in the folder: {folder}", hint="name the file itself, or a glob"
        )
    return files


def _open_part(file: str) -> Part:
    with naming(file):
        complaint = _complaint(Path(file))
        if complaint:
            raise UnreadableManifest(f"{complaint}: {file}", hint=_hint(Path(file)))
        metadata = _plain_metadata(file)
        schema = _schema(file, metadata)
        schema.names  # noqa: B018  a name that is not UTF-8 shows here
        return Part(
            file=file,
            schema=schema,
            num_rows=metadata.num_rows,
            batches=partial(_read_batches, file, schema=schema, metadata=metadata),
        )


def _schema(file: str, metadata: pq.FileMetaData) -> pa.Schema:
    """Parquet's own types, and durations, which Parquet has as bare integers."""
    stored = pq.read_schema(file)
    with pq.ParquetFile(file, metadata=metadata) as parquet:
        schema = parquet.schema_arrow
    for index, field in enumerate(stored):
        if pa.types.is_duration(field.type):
            schema = schema.set(index, field)
    return schema


def _plain_metadata(file: str) -> pq.FileMetaData:
    """The footer without the Arrow types of the writer. With them a categorical column is read by way of
    a checked cast, which fails for all rows when one value is not UTF-8."""
    with open(file, "rb") as stream:
        stream.seek(-8, os.SEEK_END)
        size = stream.read(4)
        stream.seek(-8 - int.from_bytes(size, "little"), os.SEEK_END)
        footer = stream.read(int.from_bytes(size, "little"))
    plain = footer.replace(b"ARROW:schema", b"arrow:schema")
    return pq.read_metadata(pa.BufferReader(b"PAR1" + plain + size + b"PAR1"))


def _read_batches(file: str, *, schema: pa.Schema, metadata: pq.FileMetaData) -> Iterator[pa.RecordBatch]:
    # Unbuffered, a column chunk is read whole: 200 MB for a million prompts in one row group.
    options = {"buffer_size": 1 << 20, "pre_buffer": False, "metadata": metadata}
    with naming(file), pq.ParquetFile(file, **options) as parquet:
        # One thread: a second one gains little here and keeps 50 MB.
        for batch in parquet.iter_batches(batch_size=CHUNK_ROWS, use_threads=False):
            columns = [column.cast(type) for column, type in zip(batch.columns, schema.types, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, names=schema.names)


def _hint(path: Path) -> str:
    command = {".csv": "from-csv", ".jsonl": "from-jsonl", ".ndjson": "from-jsonl"}.get(path.suffix.lower())
    if command is None or not path.exists():
        return _HINT
    return f"`vgbatch manifest {command} {path} manifest.parquet` makes a manifest of it; nothing was run"


def _complaint(path: Path) -> str | None:
    """What is plainly wrong with a file before Parquet is asked."""
    if not path.exists():
        return "no such file or folder"
    with path.open("rb") as stream:
        head = stream.read(4)
        size = stream.seek(0, 2)
        if size == 0:
            return "empty file (0 bytes), not a Parquet file"
        if head == b"PARE":
            return "encrypted Parquet is not supported"
        if head != b"PAR1":
            return f"not a Parquet file (it begins with {head!r})"
        stream.seek(max(0, size - 8))
        footer_bytes = int.from_bytes(stream.read(4), "little")
        if stream.read(4) != b"PAR1" or footer_bytes + 12 > size:
            return "truncated Parquet file (no footer at its end)"
    return None


@contextmanager
def naming(file: str, *, kind: str = "Parquet") -> Iterator[None]:
    """Errors of reading become UnreadableManifest that names the file."""
    try:
        yield
    except UnicodeError as error:
        raise UnreadableManifest(f"a column name is not valid UTF-8: {file}") from error
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.strerror:
            raise UnreadableManifest(f"cannot be read ({error.strerror}): {file}") from error
        detail = " ".join(str(error).split())
        raise UnreadableManifest(
            f"not a whole {kind} file ({detail}): {file}",
            hint=_HINT,
        ) from error
