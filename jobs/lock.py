"""One run at a time on an output folder and on a ledger."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from manifests.errors import Busy, UsageError


@contextmanager
def run_lock(*, out: Path, ledger: Path, run_id: str) -> Iterator[None]:
    """Hold both locks. Raises Busy (exit 75) that names the holder.

    flock belongs to the open file, so a killed run's lock is gone with it, and no file has to be cleaned up.
    """
    with ExitStack() as stack:
        for path in (out / ".vgbatch.lock", ledger.with_name(ledger.name + ".lock")):
            stack.enter_context(_locked(path, run_id=run_id))
        yield


@contextmanager
def _locked(path: Path, *, run_id: str) -> Iterator[None]:
    with _opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(
                f"another run is at work here: {_holder(file)}",
                hint="wait for it to end, or give this run another `--out` and `--ledger`",
            ) from None
        _sign(file, run_id)
        yield


def _opened(path: Path) -> IO[str]:
    try:
        return open(path, "a+", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the lock cannot be opened ({error.strerror}): {path}", hint="move it away, and run again"
        ) from error


def _sign(file: IO[str], run_id: str) -> None:
    file.seek(0)
    file.truncate()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "run": run_id, "started": started}, file)
    file.flush()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        holder = json.load(file)
        return f"process {holder['pid']} on {holder['host']}, run {holder['run']}, since {holder['started']}"
    except (ValueError, KeyError, TypeError):
        return "it has not yet written who it is"
