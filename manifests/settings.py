"""What the command line gives the reader."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """Defaults of every row, and how strict to be.

    model, preset: of rows that name none. crf, encoder_preset: libx264 settings of every clip.
    strict: any warned or rejected row is an error. tags: column names declared with `--tag`.
    """

    model: str
    preset: str
    crf: int
    encoder_preset: str
    strict: bool
    tags: frozenset[str]
