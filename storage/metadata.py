"""What a clip says of itself: one JSON comment inside the MP4, read back without starting ffmpeg."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

# ffmpeg puts `comment` here; `meta` is a full box, its children start 4 bytes later.
_COMMENT_PATH = (b"udta", b"meta", b"ilst", b"\xa9cmt", b"data")
_MAX_MOOV_BYTES = 64 << 20  # the index of a clip takes kilobytes; anything larger is no clip of ours


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipMetadata:
    """Which job a file is the clip of; enough to adopt it when the ledger has no row."""

    id: str
    fingerprint: str
    seed: int
    model: str

    def to_comment(self) -> str:
        """ASCII JSON on one line, so that any id (newlines, quotes, NUL) travels as an argument."""
        return json.dumps({"vgbatch": 1, **asdict(self)}, separators=(",", ":"))


def read_metadata(path: Path) -> ClipMetadata | None:
    """The metadata of a clip, or None for a file that has none: not ours, cut short, not a video.

    Reads the boxes up to the index only, so it says nothing about the frames. Raises OSError.
    """
    if not path.is_file():  # opening a FIFO would wait for its writer
        return None
    with path.open("rb") as file:
        moov = _read_moov(file)
    return None if moov is None else _parse_comment(_find(moov, _COMMENT_PATH))


def _read_moov(file: BinaryIO) -> bytes | None:
    while len(header := file.read(8)) == 8:
        size, kind = int.from_bytes(header[:4], "big"), header[4:]
        header_bytes = 8
        if size == 1:
            size, header_bytes = int.from_bytes(file.read(8), "big"), 16
        if kind == b"moov":
            return file.read(min(size - 8, _MAX_MOOV_BYTES)) if size >= 8 else None
        if size < header_bytes:
            return None
        file.seek(size - header_bytes, 1)
    return None


def _find(payload: bytes, path: tuple[bytes, ...]) -> bytes | None:
    """The payload of the box at `path` inside `payload`."""
    for name in path:
        inside = next((body for kind, body in _boxes(payload) if kind == name), None)
        if inside is None:
            return None
        payload = inside[4:] if name == b"meta" else inside
    return payload


def _boxes(payload: bytes) -> Iterator[tuple[bytes, bytes]]:
    start = 0
    while start + 8 <= len(payload):
        size = int.from_bytes(payload[start : start + 4], "big")
        if size < 8:
            return
        yield payload[start + 4 : start + 8], payload[start + 8 : start + size]
        start += size


def _parse_comment(data: bytes | None) -> ClipMetadata | None:
    if data is None:
        return None
    try:
        values = json.loads(data[8:])  # after the type and locale words
        return ClipMetadata(**{name: values[name] for name in ("id", "fingerprint", "seed", "model")})
    except (ValueError, KeyError, TypeError):
        return None
