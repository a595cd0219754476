from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipeline.embeddings
import pipeline.prompts
from jobs.runner import build_renderer
from pipeline.config import EngineConfig
from pipeline.embeddings import encoder_revision, from_bytes, to_bytes
from pipeline.engine import build_engine
from pipeline.models.resolve import ResolvedModel, resolve_model
from pipeline.models.text import MAX_TOKENS
from pipeline.models.text_encoder import encode_prompts
from pipeline.models.wan import WanModel, load_wan
from pipeline.prompts import PromptCache
from storage.embeddings import EmbeddingFolder
from tests.pipeline_checkpoints import LONG, SHORT, WORDS, build_checkpoint, make_batch, make_job

ENCODER = "e" * 32


class Store(dict[tuple[str, str], bytes]):
    """An EmbeddingStore in memory."""

    def get(self, encoder: str, text: str) -> bytes | None:  # type: ignore[override]
        return dict.get(self, (encoder, text))

    def put(self, encoder: str, text: str, content: bytes) -> None:
        self[encoder, text] = content


class Model:
    """Encodes a text as its letters, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode(self, prompts: Sequence[str]) -> list[torch.Tensor]:
        self.calls.append(list(prompts))
        return [torch.tensor([[float(ord(letter))] * 3 for letter in text]) for text in prompts]


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    return resolve_model(str(build_checkpoint(tmp_path_factory.mktemp("t2v"), "t2v")))


@pytest.fixture
def wan(resolved: ResolvedModel) -> Iterator[WanModel]:
    with torch.inference_mode():
        yield load_wan(resolved.source, device="cpu", dtype="float32", vae_dtype="float32")


# ---- what is kept in this process --------------------------------------------------------------------


def test_all_that_is_missing_is_encoded_at_once_and_each_text_once() -> None:
    model, cache = Model(), PromptCache(None)
    first = cache.encode(model, ["a", "bc", "a"], encoder=ENCODER)
    second = cache.encode(model, ["d", "bc"], encoder=ENCODER)
    assert model.calls == [["a", "bc"], ["d"]]
    assert [len(states) for states in [*first, *second]] == [1, 2, 1, 1, 2]
    assert second[1][0, 0] == ord("b")


def test_nothing_is_asked_of_the_encoder_when_all_is_known() -> None:
    model, cache = Model(), PromptCache(None)
    for _ in range(3):
        cache.encode(model, ["a", "b"], encoder=ENCODER)
    assert cache.encode(model, [], encoder=ENCODER) == []
    assert model.calls == [["a", "b"]]


def test_another_encoder_encodes_anew() -> None:
    model, cache = Model(), PromptCache(Store())
    cache.encode(model, ["a"], encoder=ENCODER)
    cache.encode(model, ["a"], encoder="f" * 32)
    assert model.calls == [["a"], ["a"]]


def test_only_the_last_used_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.prompts, "KEPT_PROMPTS", 2)
    model, cache = Model(), PromptCache(None)
    texts = ["a", "b", "c", "d"]
    assert [int(states[0, 0]) for states in cache.encode(model, texts, encoder=ENCODER)] == list(b"abcd")
    cache.encode(model, ["c"], encoder=ENCODER)
    cache.encode(model, ["e"], encoder=ENCODER)
    cache.encode(model, ["c", "d"], encoder=ENCODER)
    assert model.calls == [texts, ["e"], ["d"]]


# ---- what outlives it --------------------------------------------------------------------------------


def test_a_later_process_finds_every_bit() -> None:
    store, model = Store(), Model()
    states = PromptCache(store).encode(model, ["a", "bc"], encoder=ENCODER)
    found = PromptCache(store).encode(model, ["bc", "a"], encoder=ENCODER)
    assert model.calls == [["a", "bc"]]
    assert torch.equal(found[0], states[1])
    assert torch.equal(found[1], states[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (MAX_TOKENS, 7)])
def test_bytes_give_back_dtype_shape_and_bits(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    states = torch.randn(shape[::-1], generator=torch.Generator().manual_seed(1)).to(dtype).T
    found = from_bytes(to_bytes(states))
    assert found is not None
    assert found.dtype == dtype
    assert torch.equal(found, states)


def test_only_a_prompt_s_own_tokens_take_room(wan: WanModel) -> None:
    (states,) = wan.encode([SHORT])
    assert states.untyped_storage().nbytes() == states.nbytes < 1_000
    assert len(to_bytes(states)) < states.nbytes + 500


def test_a_file_with_any_damage_is_taken_for_none() -> None:
    content = to_bytes(torch.arange(12, dtype=torch.bfloat16).view(3, 4))
    assert from_bytes(content) is not None
    for length in range(len(content)):
        assert from_bytes(content[:length]) is None
    assert from_bytes(bytes(len(content))) is None
    assert from_bytes(content + b"\0") is None
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    for place in range(header_bytes, len(content)):
        assert from_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]) is None


def test_damage_to_the_description_gives_no_other_numbers() -> None:
    states = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    content = to_bytes(states)
    for place in range(8 + int.from_bytes(content[:8], "little")):
        for bit in range(8):
            changed = content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
            found = from_bytes(changed)
            assert found is None or (found.dtype == states.dtype and torch.equal(found, states))


def test_what_is_damaged_is_encoded_again_and_replaced() -> None:
    store, model = Store(), Model()
    (states,) = PromptCache(store).encode(model, ["a"], encoder=ENCODER)
    whole = store[ENCODER, "a"]
    store[ENCODER, "a"] = whole[:-1]
    (again,) = PromptCache(store).encode(model, ["a"], encoder=ENCODER)
    assert model.calls == [["a"], ["a"]]
    assert torch.equal(again, states)
    assert store[ENCODER, "a"] == whole


def test_numbers_that_are_none_do_not_outlive_the_process() -> None:
    class Failing(Model):
        def encode(self, prompts: Sequence[str]) -> list[torch.Tensor]:
            return [
                states.log() if text == "\0" else states
                for text, states in zip(prompts, super().encode(prompts), strict=True)
            ]

    store = Store()
    PromptCache(store).encode(Failing(), ["a", "\0"], encoder=ENCODER)
    assert [text for _, text in store] == ["a"]


def test_the_encoder_s_revision_follows_all_that_decides_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def revision(model: str = "m", dtype: str = "bfloat16", device_name: str = "NVIDIA H200") -> str:
        return encoder_revision(model, dtype=dtype, device_name=device_name)

    known = {revision(), revision("n"), revision(dtype="float32"), revision(device_name="another")}
    monkeypatch.setattr(pipeline.embeddings, "MAX_TOKENS", 256)
    known.add(revision())
    monkeypatch.setattr(pipeline.embeddings, "_ENCODING", 2)
    known.add(revision())
    monkeypatch.setattr(pipeline.embeddings, "version", lambda name: "0.0")
    known.add(revision())
    assert len(known) == 7
    assert revision() == revision()
    assert revision().isalnum()


def test_a_clip_from_kept_prompts_is_the_same_and_needs_no_encoder(
    resolved: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    config = EngineConfig(device="cpu", models={resolved.source.weights: resolved.source}, embeddings=store)
    batch = make_batch(resolved, make_job(resolved, prompt=LONG))
    (first,) = build_engine(config).render(batch).clips
    assert sorted(text for _, text in store) == ["blue", LONG]

    monkeypatch.setattr(WanModel, "encode", None)
    (second,) = build_engine(config).render(batch).clips
    assert np.array_equal(first.frames, second.frames)


def test_prompts_encoded_ahead_are_at_hand_for_any_batch_of_their_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = resolve_model("builtin")
    engine = build_engine(EngineConfig(device="cpu", models={model.source.weights: model.source}))
    jobs = [make_job(model, id=str(steps), prompt=f"a {steps}", steps=steps) for steps in (1, 2)]
    batches = [make_batch(model, job) for job in jobs]
    engine.encode(batches[0].bucket, [text for job in jobs for text in (job.prompt, job.negative_prompt)])
    monkeypatch.setattr(WanModel, "encode", None)
    for batch in batches:
        (clip,) = engine.render(batch).clips
        assert clip.frames is not None


# ---- the text encoder itself -------------------------------------------------------------------------


def test_an_embedding_depends_on_nothing_but_its_prompt(wan: WanModel) -> None:
    prompts = [SHORT, LONG, "", "字🙂", " ".join(WORDS * 80)]
    together = wan.encode(prompts)
    assert [len(states) for states in together][-1] == MAX_TOKENS
    for prompt, states in zip(prompts, together, strict=True):
        assert torch.equal(wan.encode([prompt])[0], states)
    for states, backward in zip(together, reversed(wan.encode(prompts[::-1])), strict=True):
        assert torch.equal(backward, states)


def test_embeddings_are_the_encoder_s_own_on_the_padded_prompt(wan: WanModel) -> None:
    tokens = wan.tokenizer([LONG], padding="max_length", max_length=MAX_TOKENS, return_tensors="pt")
    expected = wan.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
    (states,) = wan.encode([LONG])
    assert torch.equal(states, expected[: int(tokens.attention_mask.sum())])


def test_the_weights_are_lent_to_the_device_and_stay_where_they_were(wan: WanModel) -> None:
    places = {name: weight.data_ptr() for name, weight in wan.text_encoder.named_parameters()}
    (plain,) = wan.encode([SHORT])
    devices: list[set[str]] = []

    def note(module: Any, inputs: Any) -> None:
        devices.append({tensor.device.type for tensor in [*module.parameters(), *inputs]})

    meta = torch.device("meta")  # has no numbers to give back
    with wan.text_encoder.register_forward_pre_hook(note), pytest.raises(RuntimeError, match="meta"):
        encode_prompts([SHORT], tokenizer=wan.tokenizer, module=wan.text_encoder, device=meta)
    assert devices == [{"meta"}]
    assert {name: weight.data_ptr() for name, weight in wan.text_encoder.named_parameters()} == places
    assert torch.equal(wan.encode([SHORT])[0], plain)


# ---- the folder of a run -----------------------------------------------------------------------------


def test_a_damaged_file_of_a_run_is_replaced_by_the_next_one(resolved: ResolvedModel, tmp_path: Path) -> None:
    models = {resolved.source.weights: resolved.source}
    build = pickle.loads(
        pickle.dumps(partial(build_renderer, models=models, embeddings=EmbeddingFolder(tmp_path)))
    )
    batch = make_batch(resolved, make_job(resolved, guidance_scale=1.0))
    build("cpu").render(batch)
    (path,) = tmp_path.rglob("*.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    build("cpu").render(batch)
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_written_costs_no_clip(resolved: ResolvedModel, tmp_path: Path) -> None:
    (tmp_path / ".vgbatch").write_text("in the way")
    models = {resolved.source.weights: resolved.source}
    engine = build_renderer("cpu", models=models, embeddings=EmbeddingFolder(tmp_path))
    (clip,) = engine.render(make_batch(resolved, make_job(resolved, guidance_scale=1.0))).clips
    assert clip.error is None
