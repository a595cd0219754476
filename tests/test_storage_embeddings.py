from __future__ import annotations

import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage import embeddings
from storage.embeddings import EmbeddingFolder

ENCODER = "a" * 32


def files_of(out: Path) -> list[Path]:
    return sorted(path for path in (out / ".vgbatch").rglob("*") if path.is_file())


def test_what_one_process_keeps_another_finds(tmp_path: Path) -> None:
    text = "a cat 字\ud800"
    EmbeddingFolder(tmp_path).put(ENCODER, text, b"numbers")
    other = pickle.loads(pickle.dumps(EmbeddingFolder(tmp_path)))
    assert other.get(ENCODER, text) == b"numbers"
    assert other.get(ENCODER, "a cat") is None
    assert other.get("b" * 32, text) is None


def test_files_are_named_by_encoder_and_hash_of_the_text(tmp_path: Path) -> None:
    EmbeddingFolder(tmp_path).put(ENCODER, "../../etc/passwd", b"x")
    (path,) = files_of(tmp_path)
    assert re.fullmatch(
        rf"\.vgbatch/embeddings/{ENCODER}/[0-9a-f]{{64}}\.safetensors", str(path.relative_to(tmp_path))
    )


def test_nothing_is_made_before_something_is_kept(tmp_path: Path) -> None:
    folder = EmbeddingFolder(tmp_path)
    assert folder.get(ENCODER, "a") is None
    folder.trim()
    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_again_is_replaced(tmp_path: Path) -> None:
    folder = EmbeddingFolder(tmp_path)
    folder.put(ENCODER, "a", b"damaged")
    folder.put(ENCODER, "a", b"whole")
    assert folder.get(ENCODER, "a") == b"whole"
    assert len(files_of(tmp_path)) == 1


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    contents = [bytes([number]) * 200_000 for number in range(8)]
    seen: list[bytes | None] = []

    def write(content: bytes) -> None:
        folder = EmbeddingFolder(tmp_path)
        for _ in range(5):
            folder.put(ENCODER, "a", content)
            seen.append(folder.get(ENCODER, "a"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, contents))
    assert set(seen) <= set(contents)
    assert len(files_of(tmp_path)) == 1


def test_a_write_that_is_cut_off_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = EmbeddingFolder(tmp_path)
    folder.put(ENCODER, "a", b"first")

    def full(path: Path, content: bytes) -> int:
        with open(path, "wb") as file:
            file.write(content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    folder.put(ENCODER, "a", b"second")
    assert folder.get(ENCODER, "a") == b"first"
    assert len(files_of(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".vgbatch").write_text("in the way")
    folder = EmbeddingFolder(tmp_path)
    for text in ("a", "b", "c"):
        folder.put(ENCODER, text, b"x")
        assert folder.get(ENCODER, text) is None
    folder.trim()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"warning: encoded prompts are not kept in {tmp_path}/.vgbatch/embeddings: Not a directory"
    ]


def test_trimming_removes_what_was_not_used_for_longest(tmp_path: Path) -> None:
    folder = EmbeddingFolder(tmp_path, max_bytes=300)
    for age_s, text in enumerate(["new", "older", "oldest"]):
        folder.put(ENCODER, text, b"x" * 100)
        path = max(files_of(tmp_path), key=lambda path: path.stat().st_ctime_ns)
        os.utime(path, (1_000_000 - age_s, 1_000_000 - age_s))
    folder.get(ENCODER, "oldest")  # now it is the one used last
    folder.trim()
    assert len(files_of(tmp_path)) == 3

    EmbeddingFolder(tmp_path, max_bytes=200).trim()
    assert [folder.get(ENCODER, text) is not None for text in ("new", "older", "oldest")] == [
        True,
        False,
        True,
    ]


def test_trimming_removes_what_killed_processes_left_half_written(tmp_path: Path) -> None:
    folder = EmbeddingFolder(tmp_path, max_bytes=150)
    folder.put(ENCODER, "a", b"x" * 100)
    partial = files_of(tmp_path)[0].with_name(".left.partial")
    partial.write_bytes(b"x" * 100)
    os.utime(partial, (0, 0))
    folder.trim()
    assert folder.get(ENCODER, "a") is not None
    assert not partial.exists()


def test_one_of_several_writers_adds_its_share_at_most(tmp_path: Path) -> None:
    folder = EmbeddingFolder(tmp_path, num_writers=3, max_bytes=750)
    for text in "abcde":
        folder.put(ENCODER, text, b"x" * 100)
    assert [folder.get(ENCODER, text) is not None for text in "abcde"] == [True, True, False, False, False]


def test_the_default_holds_thousands_of_prompts_of_the_largest_size() -> None:
    assert embeddings.MAX_BYTES >= 2_000 * 512 * 4096 * 2
