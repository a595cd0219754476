"""Short visits to a DuckDB file that only one process may have open for writing."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

from manifests.errors import Busy, LedgerError

PATIENCE_S = 5.0  # how long to wait for another process to leave the ledger
_POLL_S = 0.05

# Within a process DuckDB shares an open file between threads, but not for reading and writing at once.
_ONE_AT_A_TIME = threading.RLock()

# What DuckDB itself may hold; above it, it spills beside the file. A million clips need half of it.
_MEMORY_LIMIT = "1GB"
_THREADS = min(4, os.cpu_count() or 1)

# Not the user's query at fault but the file, its disk or its memory.
_BROKEN = (
    duckdb.IOException,
    duckdb.OutOfMemoryException,
    duckdb.FatalException,
    duckdb.TransactionException,  # a commit that finds the disk full
)


@contextmanager
def visit(path: Path, *, read_only: bool, patience_s: float, may_create: bool = False) -> Iterator[Any]:
    """A connection to `path`, closed at the end; an open transaction is rolled back.

    Waits up to `patience_s` for another process to leave. Raises Busy, or LedgerError when the file is
    not there, not DuckDB, unreadable, or its disk is full. Instants are UTC whatever TZ says.
    """
    try:
        # Alone also to look at the file: whoever closes it, for whatever, takes this process's lock off it.
        with _ONE_AT_A_TIME, _held(path) as held:
            connection = _connect(path, read_only=read_only, patience_s=patience_s)
            try:
                if not may_create and (held is None or os.fstat(held).st_nlink == 0):
                    # DuckDB makes a file that it does not find, as where a folder is just being removed.
                    path.unlink(missing_ok=True)
                    raise LedgerError(f"the ledger {path} is gone")
                # A long query would draw a bar between our own lines.
                connection.execute("SET TimeZone = 'UTC'; SET enable_progress_bar = false")
                yield connection
            finally:
                connection.close()
    except _BROKEN as error:
        doing = "read" if read_only else "written"
        raise LedgerError(f"the ledger {path} cannot be {doing}: {error}") from error


@contextmanager
def _held(path: Path) -> Iterator[int | None]:
    """The open file, None where there is none. LedgerError for what is no DuckDB file, as DuckDB itself opens
    Parquet, CSV and JSON files as databases in memory, and would not say no."""
    if not path.exists():
        yield None
        return
    if not path.is_file():
        raise LedgerError(f"not a file: {path}", hint="name another one with `--ledger`")
    try:
        file = path.open("rb")
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be read: {error.strerror}") from error
    with file:
        if file.read(12)[8:] != b"DUCK":
            raise LedgerError(
                f"not a ledger: {path}",
                hint="name another file with `--ledger`, or move this one away: whole clips are adopted",
            )
        yield file.fileno()


def _connect(path: Path, *, read_only: bool, patience_s: float) -> Any:
    config = {"memory_limit": _MEMORY_LIMIT, "threads": _THREADS}
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return duckdb.connect(str(path.absolute()), read_only=read_only, config=config)
        except (duckdb.IOException, duckdb.ConnectionException) as error:
            holder = _holder(str(error))
            if holder is None:
                raise
            if time.monotonic() >= deadline:
                raise Busy(
                    f"the ledger {path} is held by {holder}",
                    hint="close what has it open (another run, a notebook, a viewer), or try again later",
                ) from error
        time.sleep(_POLL_S)


def _holder(message: str) -> str | None:
    """Who has the file open, from DuckDB's complaint; None when it complains of something else."""
    if "different configuration" in message:
        return f"this process (PID {os.getpid()})"
    if "set lock on file" not in message:
        return None
    program = re.search(r"held in (.+?) \(PID (\d+)\)", message)
    if program:
        return f"{Path(program[1]).name} (PID {program[2]})"
    return "another process"
