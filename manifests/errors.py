"""What a user can cause, as a tree; everything else is a bug and keeps its traceback.

VgbatchError                  exit code
├── UsageError                2   a flag, a price, a config value
├── ManifestError             2   nothing runs
│   ├── UnreadableManifest
│   ├── MissingColumn
│   ├── UnknownColumn
│   └── DuplicateIds
├── ModelError                2   missing, unreachable, not a model we know
├── LedgerError               2
│   └── Busy                  75  another process holds the lock or the ledger
├── RunError                  1   a run that had begun cannot go on
└── JobError                  -   one job fails, the run goes on
    ├── RenderError
    │   ├── NonFiniteOutput
    │   └── OutOfDeviceMemory
    └── VideoError
        └── OutOfSpace
"""

from __future__ import annotations


class VgbatchError(Exception):
    """Base of every error a user can cause.

    message: one sentence, the value after a colon. hint: the next step, printed on its own line.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def advice(self) -> str:
        """Message and hint as one text, for places that keep no more: the hint ends the first line."""
        if self.hint is None:
            return self.message
        first, newline, rest = self.message.partition("\n")
        return f"{first}; {self.hint}{newline}{rest}"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling, and workers send errors to the parent.
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(cls: type[VgbatchError], message: str, hint: str | None) -> VgbatchError:
    return cls(message, hint=hint)


class UsageError(VgbatchError):
    pass


class ManifestError(VgbatchError):
    pass


class UnreadableManifest(ManifestError):
    pass


class MissingColumn(ManifestError):
    pass


class UnknownColumn(ManifestError):
    pass


class DuplicateIds(ManifestError):
    pass


class ModelError(VgbatchError):
    pass


class LedgerError(VgbatchError):
    pass


class Busy(LedgerError):
    exit_code = 75


class RunError(VgbatchError):
    exit_code = 1


class JobError(VgbatchError):
    pass


class RenderError(JobError):
    pass


class NonFiniteOutput(RenderError):
    pass


class OutOfDeviceMemory(RenderError):
    pass


class VideoError(JobError):
    pass


class OutOfSpace(VideoError):
    pass
