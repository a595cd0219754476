"""Why a run stops before its plan is done: a signal, or a full disk."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """The first signal lets batches on a device finish; the second ends the run at once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.signum: int | None = None
        self.at_once = False

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Stop handing out work. The first reason stays."""
        self.reason = self.reason or reason

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen to SIGINT and SIGTERM inside the block, as before it afterwards."""
        previous = {signum: signal.signal(signum, self._hear) for signum in SIGNALS}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self.at_once = self.signum is not None
        self.signum = signum
        self.request(signal.Signals(signum).name)
