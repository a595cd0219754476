"""Folders: made, proved writable, measured, forced to the disk."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from manifests.errors import UsageError


def require_writable(folder: Path) -> None:
    """Makes `folder` and its parents, and proves that a file can be written there. Raises UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".vgbatch-"):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to the folder {folder}: {error.strerror}", hint="choose another with `--out`"
        ) from error


def is_out_of_space(error: OSError) -> bool:
    """Whether the disk, or a user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def free_bytes(folder: Path) -> int:
    """Bytes an ordinary user can still write on the disk `folder` is on, or will be on once made."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
