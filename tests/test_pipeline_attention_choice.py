"""A library for attention is chosen by time, once, and the choice outlives the process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.graph import attention_choice
from pipeline.graph.attention_choice import backend_chooser, choose_backend
from pipeline.kernels.attention import CUDNN, FLASH3, TORCH, query_rows

SHAPE, OTHER = (1, 640, 2, 128), (1, 320, 2, 128)
TIMES_S = {"flash3": 2.0, "cudnn": 1.0, "torch": 3.0}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A card with three libraries; which of them were timed."""
    calls: list[str] = []

    def median_s(backend: str, *_: object) -> float:
        calls.append(backend)
        return TIMES_S[backend]

    monkeypatch.setattr(attention_choice, "available_backends", lambda device, dtype: tuple(TIMES_S))
    monkeypatch.setattr(attention_choice, "device_name", lambda device: "Card")
    monkeypatch.setattr(attention_choice, "_median_s", median_s)
    return calls


def choose(file: Path, shape: tuple[int, int, int, int] = SHAPE) -> str:
    return choose_backend(shape, dtype=torch.bfloat16, device="cuda:0", file=file)


def edit(file: Path, backend: str) -> None:
    file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), backend)))


@pytest.mark.parametrize(
    ("num_queries", "rows"),
    [(31_248, 31_361), (31_361, 31_361), (32_760, 32_760), (61_488, 61_569), (320, 320), (0, 0)],
)
def test_many_blocks_of_queries_become_even(num_queries: int, rows: int) -> None:
    assert query_rows(num_queries, backend=FLASH3) == rows
    assert query_rows(num_queries, backend=CUDNN) == query_rows(num_queries, backend=TORCH) == num_queries


def test_the_cpu_has_one_library_and_measures_nothing(tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    assert choose_backend(SHAPE, dtype=torch.float32, device="cpu", file=file) == "torch"
    assert not file.exists()


def test_the_quickest_is_taken_once_and_kept(timed: list[str], tmp_path: Path) -> None:
    file = tmp_path / "deep" / "attention.json"
    assert [choose(file), choose(file)] == ["cudnn", "cudnn"]
    assert sorted(timed) == sorted(TIMES_S)
    ((key, kept),) = json.loads(file.read_text()).items()
    assert kept == "cudnn"
    assert all(part in key for part in ("Card", torch.__version__, "bfloat16", "1x640x2x128"))


def test_each_shape_has_its_own_choice(timed: list[str], tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    choose(file), choose(file, OTHER)
    assert len(timed) == 2 * len(TIMES_S)
    assert len(json.loads(file.read_text())) == 2


def test_a_kept_choice_wins_over_the_clock(timed: list[str], tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    choose(file)
    edit(file, "flash3")
    assert choose(file) == "flash3"


@pytest.mark.parametrize("content", ["", "{", "[]", "[1, 2]", '{"a": 1}', "\x00"])
def test_a_damaged_file_is_measured_anew(timed: list[str], tmp_path: Path, content: str) -> None:
    file = tmp_path / "attention.json"
    file.write_text(content)
    assert choose(file) == "cudnn"
    assert "cudnn" in json.loads(file.read_text()).values()


def test_a_library_that_is_gone_is_not_chosen(timed: list[str], tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    choose(file)
    edit(file, "of another build")
    assert choose(file) == "cudnn"


def test_a_folder_that_cannot_be_written_costs_a_measurement_only(timed: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert choose(tmp_path / "file" / "attention.json") == "cudnn"


def test_a_process_asks_the_file_once_for_each_shape(timed: list[str], tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    backend_of = backend_chooser(dtype=torch.bfloat16, device="cuda:0", file=file)
    assert backend_of(SHAPE) == "cudnn"
    edit(file, "flash3")
    assert backend_of(SHAPE) == "cudnn"
