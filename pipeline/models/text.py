"""Prompts as the text encoder reads them: cleaned, then counted in tokens. No torch here."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

MAX_TOKENS = 512  # what Wan's text encoder reads; the rest of a longer prompt is cut


def clean_prompt(text: str) -> str:
    """Repair broken encodings, undo HTML escapes (twice, as Wan's training did), collapse whitespace."""
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


class TokenCounter:
    """Counts the tokens of prompts, end marker included, without a limit.

    folder: a checkpoint's `tokenizer`, with tokenizer.json or spiece.model; read at the first call.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, texts: Sequence[str]) -> list[int]:
        return self._count([clean_prompt(text) for text in texts])

    @cached_property
    def _count(self) -> Any:
        if (self.folder / "tokenizer.json").is_file():
            return _fast_counter(self.folder / "tokenizer.json")
        return _sentencepiece_counter(self.folder / "spiece.model")


def _fast_counter(file: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda texts: [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]


def _sentencepiece_counter(file: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(file))
    return lambda texts: [len(ids) + 1 for ids in processor.encode(texts)]  # the end marker is not in them
