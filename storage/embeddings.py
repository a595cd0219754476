"""Encoded prompts on disk, for runs to come: bytes by encoder and text. One that is lost is encoded again."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

# umT5-XXL gives 8 KB a token: some 12,000 prompts of 100 tokens.
MAX_BYTES = 10_000_000_000


class EmbeddingFolder:
    """`<out>/.vgbatch/embeddings/<encoder>/<SHA-256 of text>.safetensors`, written by several processes.

    num_writers: that share one folder; each writes its part of max_bytes at most, so that a run cannot add
    more than that, and `trim` makes room afterwards. No method raises OSError: the folder is never needed.
    """

    def __init__(self, out: Path, *, num_writers: int = 1, max_bytes: int = MAX_BYTES) -> None:
        self.folder = out / ".vgbatch" / "embeddings"
        self._max_bytes = max_bytes
        self._left_bytes = max_bytes // num_writers

    def get(self, encoder: str, text: str) -> bytes | None:
        path = self._path(encoder, text)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        with suppress(OSError):
            os.utime(path)  # `trim` begins with what was not used for longest
        return content

    def put(self, encoder: str, text: str, content: bytes) -> None:
        """Replaces what is there. Another process sees the whole content or none of it."""
        if len(content) > self._left_bytes:
            return
        path = self._path(encoder, text)
        partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            self._give_up(error)
        else:
            self._left_bytes -= len(content)

    def trim(self) -> None:
        """Removes what was not used for longest, down to max_bytes."""
        files = sorted(self._files(), key=lambda file: file[1].st_mtime_ns)
        excess_bytes = sum(status.st_size for _, status in files) - self._max_bytes
        for path, status in files:
            if excess_bytes <= 0:
                return
            with suppress(OSError):
                path.unlink()
                excess_bytes -= status.st_size

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """Partials of killed processes too."""
        found = []
        for folder, _, names in os.walk(self.folder):
            for path in (Path(folder, name) for name in names):
                with suppress(OSError):  # another run may remove it meanwhile
                    found.append((path, path.lstat()))
        return found

    def _path(self, encoder: str, text: str) -> Path:
        return (
            self.folder / encoder / f"{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}.safetensors"
        )

    def _give_up(self, error: OSError) -> None:
        self._left_bytes = 0
        print(f"warning: encoded prompts are not kept in {self.folder}: {error.strerror}", file=sys.stderr)
