from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.manifest_cases import by_row, read_columns, verdicts


def sizes(folder: Path, columns: dict[str, Any]) -> list[tuple[int, ...]]:
    names = ["width", "height", "render_width", "render_height"]
    return [tuple(row.values()) for row in read_columns(folder, columns).jobs.select(names).to_pylist()]


def test_the_exact_size_is_delivered_and_the_next_valid_one_rendered(tmp_path: Path) -> None:
    columns = {"width": [250, 640, 64], "height": [130, 360, 96]}
    assert sizes(tmp_path, columns) == [(250, 130, 256, 144), (640, 360, 640, 368), (64, 96, 64, 96)]
    assert read_columns(tmp_path, columns).jobs["warning"].to_pylist() == [
        "rendered at 256x144, cropped to 250x130",
        "rendered at 640x368, cropped to 640x360",
        None,
    ]


def test_the_next_valid_count_is_rendered_and_trimmed(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"num_frames": [15, 16, 17, 1, 2]})
    assert list(by_row(reading, "num_frames").values()) == [15, 16, 17, 1, 2]
    assert list(by_row(reading, "render_frames").values()) == [17, 17, 17, 1, 5]
    assert list(by_row(reading, "warning").values()) == [
        "17 frames rendered, trimmed to 15",
        "17 frames rendered, trimmed to 16",
        None,
        None,
        "5 frames rendered, trimmed to 2",
    ]


def test_several_adjustments_are_one_warning(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"prompt": ["word " * 30], "width": [250], "num_frames": [15]})
    (warning,) = reading.jobs["warning"].to_pylist()
    assert warning.split("; ") == [
        "rendered at 256x64, cropped to 250x64",
        "17 frames rendered, trimmed to 15",
        "prompt has 30 tokens, the encoder reads 20: the rest is cut",
    ]


@pytest.mark.parametrize(
    ("width", "said"),
    [
        (65, "nearest: 64 or 66"),
        (33, "nearest: 32 or 34"),
        (30, "nearest: 32"),
        (2, "nearest: 32"),
        (1, "too small"),
        (1282, "nearest: 1280"),
        (2**31 - 2, "too large"),
        (1281, "too large"),
        (0, "even"),
        (-64, "even"),
        (2**40, "even"),
    ],
)
def test_a_size_that_cannot_be_done_says_which_could(tmp_path: Path, width: int, said: str) -> None:
    reading = read_columns(tmp_path, {"width": [width, 64]})
    assert verdicts(reading) == {0: "width", 1: "ok"}
    (rejected,) = reading.rejected.to_pylist()
    assert rejected["value"] == str(width)
    assert said in rejected["reason"]


def test_height_follows_the_same_rules(tmp_path: Path) -> None:
    assert verdicts(read_columns(tmp_path, {"height": [65, 30, 1300, 1280]})) == {
        0: "height",
        1: "height",
        2: "height",
        3: "ok",
    }


def test_too_many_frames_say_how_many_there_may_be(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"num_frames": [82, None, 81], "duration": [None, 60.0, None]})
    assert verdicts(reading) == {0: "num_frames", 1: "duration", 2: "ok"}
    for reason in reading.rejected["reason"].to_pylist():
        assert "at most 81 frames, 10.1 s at 8 fps" in reason


@pytest.mark.parametrize("text", ["832x480", "832X480", " 832 x 480 ", "832×480", "480p", "480P"])
def test_a_resolution_is_a_size_or_a_name(tmp_path: Path, text: str) -> None:
    assert sizes(tmp_path, {"resolution": [text]}) == [(832, 480, 832, 480)]


@pytest.mark.parametrize("text", ["4k", "", "832", "x", "832x", "-832x480", "0x0", "832x480x3"])
def test_an_unknown_resolution_is_rejected_with_the_names(tmp_path: Path, text: str) -> None:
    reading = read_columns(tmp_path, {"resolution": [text, None]})
    assert verdicts(reading) == {0: "resolution", 1: "ok"}
    assert "`480p`" in reading.rejected["reason"][0].as_py()


def test_a_resolution_obeys_the_rules_of_sizes(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"resolution": ["65x64", "64x2000"]})
    assert verdicts(reading) == {0: "resolution", 1: "resolution"}


def test_a_resolution_must_agree_with_width_and_height(tmp_path: Path) -> None:
    reading = read_columns(
        tmp_path,
        {
            "resolution": ["96x64", "96x64", "96x64", None],
            "width": [96, 64, None, 64],
            "height": [None, None, 32, 96],
        },
    )
    assert verdicts(reading) == {0: "ok", 1: "resolution", 2: "resolution", 3: "ok"}


def test_sizes_may_be_floats_and_text(tmp_path: Path) -> None:
    assert sizes(tmp_path, {"width": [96.0], "height": ["64"]}) == [(96, 64, 96, 64)]
