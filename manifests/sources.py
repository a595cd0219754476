"""From what the user named to Parquet files that can be read, batch by batch."""

from __future__ import annotations

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
            raise UnreadableManifest(f"{complaint}: {file}", hint="write it again; nothing was run")
        with pq.ParquetFile(file) as parquet:
            schema = parquet.schema_arrow
            schema.names  # noqa: B018  a name that is not UTF-8 shows here
            return Part(
                file=file,
                schema=schema,
                num_rows=parquet.metadata.num_rows,
                batches=partial(_read_batches, file),
            )


def _read_batches(file: str) -> Iterator[pa.RecordBatch]:
    # Unbuffered, a column chunk is read whole: 200 MB for a million prompts in one row group.
    with naming(file), pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as parquet:
        yield from parquet.iter_batches(batch_size=CHUNK_ROWS, use_threads=False)


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
        stream.seek(max(0, size - 4))
        if size < 12 or stream.read(4) != b"PAR1":
            return "truncated Parquet file (no footer at its end)"
    return None


@contextmanager
def naming(file: str, *, kind: str = "Parquet") -> Iterator[None]:
    """Errors of reading become UnreadableManifest that names the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UnreadableManifest(f"a column name is not valid UTF-8: {file}") from error
    except OSError as error:
        raise UnreadableManifest(f"cannot be read ({error.strerror or error}): {file}") from error
    except pa.ArrowException as error:
        raise UnreadableManifest(
            f"not a whole {kind} file ({str(error).splitlines()[0]}): {file}",
            hint="write it again; nothing was run",
        ) from error
