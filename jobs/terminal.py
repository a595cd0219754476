"""Where a command prints: streams that may be closed, full or no terminal, and text that may be hostile."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Rich takes a file for 80 columns wide, and would break a log's lines there.
LOG_WIDTH = 200


def prepare_streams() -> None:
    """stdout and stderr that are there, take any text, and messages that never end a run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for good
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)
    sys.stderr = _BestEffort(sys.stderr)  # all of a TextIO that is used


def open_console(stream: TextIO) -> Console:
    """A rich console on a stream; as wide as a terminal, or wide enough for a log."""
    from rich.console import Console

    return Console(file=stream, width=None if stream.isatty() else LOG_WIDTH)


def printable(text: str) -> str:
    """Text without control characters: an id may hold what would recolour or clear a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def line(console: Console, text: str) -> None:
    """One line as it is: no markup, no wrapping."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


class _BestEffort:
    """A message stream that loses what cannot be written: a full log or a reader that left must not
    cost the night."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
