"""`clips.parquet`: what the next step of a user's pipeline reads."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from manifests.errors import LedgerError
from storage.filesystem import sync_folder

CLIPS_FILE = "clips.parquet"


def write_clips_parquet(table: pa.Table, folder: Path) -> Path:
    """Replaces `<folder>/clips.parquet` in one step: a reader sees the old one or the new one, whole."""
    final = folder / CLIPS_FILE
    partial = folder / f".{CLIPS_FILE}.partial"
    try:
        with partial.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, final)
        sync_folder(folder)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise LedgerError(f"{final} could not be written: {error}") from error
    return final
