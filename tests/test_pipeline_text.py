from __future__ import annotations

from pathlib import Path

import pytest
import regex
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from transformers import AutoTokenizer

from pipeline.models import resolve
from pipeline.models.text import TokenCounter, clean_prompt
from pipeline.models.tiny.tokenizer import build_tokenizer
from tests.pipeline_checkpoints import WORDS

BUILTIN_TOKENIZER = Path(resolve.__file__).with_name("tiny") / "tokenizer"
PROMPTS = [
    "",
    "a red balloon",
    "  A cat\n\twalks,   slowly  ",
    "caf\u00c3\u00a9 &amp;amp; bar &lt;3",
    "字" * 90,
    "🙂👩‍👩‍👧🏳️‍🌈",
    "\u201cquoted\u201d\u2026",
    "</s> <pad> <0x41>",
    "word " * 600,
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt[:12])
def test_prompts_are_cleaned_as_diffusers_cleans_them(prompt: str) -> None:
    assert clean_prompt(prompt) == prompt_clean(prompt)


def test_every_kind_of_white_space_is_collapsed_as_diffusers_does() -> None:
    spaces = [chr(code) for code in range(0x3100) if chr(code).isspace() or regex.match(r"\s", chr(code))]
    assert len(spaces) > 20
    for space in spaces:
        text = f" a{space}{space}b{space}"
        assert clean_prompt(text) == prompt_clean(text), hex(ord(space))


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt[:12])
def test_tokens_are_counted_as_the_engine_will_read_them(prompt: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_TOKENIZER)
    assert TokenCounter(BUILTIN_TOKENIZER)([prompt]) == [len(tokenizer(prompt_clean(prompt)).input_ids)]


def test_counting_has_no_limit_even_where_the_tokenizer_file_sets_one(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(WORDS)
    tokenizer.backend_tokenizer.enable_truncation(max_length=8)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TokenCounter(tmp_path)(["the cat", "the " * 600]) == [3, 601]


def test_a_sentencepiece_model_counts_where_there_is_no_tokenizer_file(tmp_path: Path) -> None:
    import sentencepiece

    sentences = iter([" ".join(WORDS), *WORDS] * 20)
    settings = {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2}
    with (tmp_path / "spiece.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=file, **settings)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    counts = TokenCounter(tmp_path)(["the  cat", ""])
    assert counts == [len(processor.encode("the cat")) + 1, 1]
