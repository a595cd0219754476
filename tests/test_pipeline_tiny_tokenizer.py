"""The built-in model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from pipeline.models import tiny
from pipeline.models.tiny.networks import make_tokenizer
from pipeline.models.tiny.tokenizer import build_tokenizer

SHIPPED = Path(tiny.__file__).parent / "tokenizer"


def test_the_one_that_ships_is_what_training_and_export_make() -> None:
    """Weights are trained on token numbers: no word may move."""
    made = json.loads(make_tokenizer().backend_tokenizer.to_str())
    assert made == json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))


def test_a_word_it_has_is_one_token_and_any_other_is_letters_or_bytes() -> None:
    backend: Tokenizer = build_tokenizer(["cat", "walks"]).backend_tokenizer
    assert backend.encode("cat walks").tokens == ["▁cat", "▁walks", "</s>"]
    assert backend.encode("act").tokens == ["▁a", "c", "t", "</s>"]
    assert backend.encode("猫").tokens == ["▁", "<0xE7>", "<0x8C>", "<0xAB>", "</s>"]
    assert backend.decode(backend.encode("cat 猫 naïve").ids) == "cat 猫 naïve"
