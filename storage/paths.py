"""Names of clips in the output folder, and the only way a clip gets its final one."""

from __future__ import annotations

import filecmp
import os
import re
import unicodedata
from array import array
from hashlib import sha256
from pathlib import Path

import pyarrow as pa

from manifests.errors import UsageError, VideoError
from storage.filesystem import sync_folder
from storage.metadata import read_metadata

MAX_NAME_BYTES = 150
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{12}\.mp4\..+\.partial")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
# Windows opens a device for these, whatever extension follows.
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)


def clip_name(id: str, fingerprint: str) -> str:
    """`<slug of id>.<12 hex digits>.mp4`: ASCII, at most 150 bytes, safe in any folder.

    The digits are of SHA-256 over id and fingerprint, so ids with the same slug do not meet.
    """
    return _name(id, key=f"{id}\0{fingerprint}", suffix=".mp4")


def folder_name(title: str, *, key: str) -> str:
    """`<slug of title>.<12 hex digits of key>`, as safe; another key gives another name."""
    return _name(title, key=key, suffix="")


def partial_name(name: str, *, run_id: str) -> str:
    """Where run `run_id` writes the clip `name` until it is whole: hidden, in the same folder."""
    return f".{name}.{run_id}.partial"


def remove_partials(folder: Path) -> int:
    """Removes what dead runs left half-written, says how many. The caller holds the folder's lock."""
    paths = [folder / name for name in os.listdir(folder) if _PARTIAL.fullmatch(name)]
    partials = [path for path in paths if path.is_symlink() or not path.is_dir()]
    for path in partials:
        path.unlink()
    return len(partials)


def list_clips(folder: Path) -> pa.Table:
    """file and num_bytes of all published clips in `folder`, in no order.

    A folder that does not exist has none.
    """
    names: list[str] = []
    sizes = array("q")
    if folder.exists():
        if not folder.is_dir():
            raise UsageError(f"not a folder: {folder}", hint="give another one with `--out`")
        with os.scandir(folder) as entries:
            for entry in entries:
                # Our names are ASCII; others may not even be Unicode.
                if entry.name.endswith(".mp4") and entry.name.isascii() and entry.is_file():
                    names.append(entry.name)
                    sizes.append(entry.stat().st_size)
    return pa.table({"file": pa.array(names, pa.string()), "num_bytes": pa.array(sizes, pa.int64())})


def publish(partial: Path, final: Path) -> None:
    """Gives a verified, synced partial its final name, durably; the only place that does.

    A clip of the same job and fingerprint, or an empty file, is replaced; other content never: VideoError.
    Only the holder of the folder's lock calls this, so nothing appears between the look and the rename.
    """
    try:
        if final.exists() and not _replaceable(final, partial):
            raise VideoError(
                f"a file that is not this clip has its name: {final}", hint="move it away and run again"
            )
        os.replace(partial, final)
        sync_folder(final.parent)
    except OSError as error:
        raise VideoError(f"{final} could not be published: {error}") from error


def _name(title: str, *, key: str, suffix: str) -> str:
    digest = sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    ending = f".{digest}{suffix}"
    return _slug(title)[: MAX_NAME_BYTES - len(ending)] + ending


def _slug(id: str) -> str:
    plain = unicodedata.normalize("NFKD", id).encode("ascii", "ignore").decode()
    slug = _UNSAFE.sub("_", plain).strip("._-") or "clip"
    return f"clip-{slug}" if _RESERVED.match(slug) else slug


def _replaceable(final: Path, partial: Path) -> bool:
    if not final.is_file():
        return False
    if final.stat().st_size == 0:
        return True
    theirs, ours = read_metadata(final), read_metadata(partial)
    if theirs is not None and ours is not None:
        return (theirs.id, theirs.fingerprint) == (ours.id, ours.fingerprint)
    return filecmp.cmp(final, partial, shallow=False)
