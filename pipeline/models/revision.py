"""The revision of a local checkpoint: a hash of its contents. No torch here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path

# Hashing less than this is faster than trusting size and time, which miss an edit within one clock tick.
CACHED_FROM_BYTES = 16_000_000


def folder_revision(folder: Path, files: Iterable[str]) -> str:
    """64 hex digits over the names and contents of `files`, given relative to folder.

    Digests of large files are kept by path, size and time in the user's cache folder, where there is one.
    """
    known = _load_cache()
    seen = dict(known)
    whole = sha256()
    for name in sorted(files):
        whole.update(f"{name}\0{_file_digest(folder / name, seen)}\n".encode())
    if seen != known:
        _save_cache(seen)
    return whole.hexdigest()


def _file_digest(file: Path, seen: dict[str, list[object]]) -> str:
    status = file.stat()
    stamp = [status.st_size, status.st_mtime_ns]
    known = seen.get(str(file.resolve()))
    if isinstance(known, list) and known[:2] == stamp and len(known) == 3:
        return str(known[2])
    with file.open("rb") as stream:
        digest = file_digest(stream, "sha256").hexdigest()
    if status.st_size >= CACHED_FROM_BYTES:
        seen[str(file.resolve())] = [*stamp, digest]
    return digest


def _cache_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vgbatch" / "file-digests.json"


def _load_cache() -> dict[str, list[object]]:
    try:
        cache = json.loads(_cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home folder
        return {}
    return cache if isinstance(cache, dict) else {}


def _save_cache(cache: dict[str, list[object]]) -> None:
    # Only a saving of time: where it cannot be written the next start hashes again.
    with suppress(OSError, RuntimeError):
        file = _cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        there = {name: entry for name, entry in cache.items() if os.path.exists(name)}
        partial.write_text(json.dumps(there), encoding="utf-8")
        partial.replace(file)
