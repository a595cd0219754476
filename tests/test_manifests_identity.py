from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.manifest_cases import SETTINGS, by_row, read_columns, read_file


def fingerprint(folder: Path, columns: dict[str, Any], **changes: Any) -> str:
    (value,) = read_columns(folder, columns, **changes).jobs["fingerprint"].to_pylist()
    return str(value)


# ---- fingerprints ------------------------------------------------------------------------------------


def test_fingerprints_never_change(tmp_path: Path) -> None:
    """A changed encoding would render every delivered clip again."""
    plain = {"id": ["a"], "prompt": ["a red circle"]}
    full = {
        "id": ["b"],
        "prompt": ["ein Kreis — 赤い円\n2:x"],
        "negative_prompt": [""],
        "width": [250],
        "height": [130],
        "num_frames": [15],
        "fps": ["24000/1001"],
        "seed": [9223372036854775807],
        "steps": [30],
        "guidance_scale": [1e-7],
        "guidance_scale_2": [4],
        "flow_shift": [5.5],
        "model": ["moe"],
    }
    assert fingerprint(tmp_path, plain) == (
        "23a29805c56a84fae5b58a0ff25fff5634925a68707703a130db9f5671935cfa"
    )
    assert fingerprint(tmp_path, full) == ("f8d6e85595e6a65bbf87db904f6fe42d2bfe9ab67021525aa06b856ed2111e2d")


def test_the_fingerprint_is_the_documented_hash(tmp_path: Path) -> None:
    settings = {
        "prompt": "a é",
        "negative_prompt": "blurry",
        "width": "64",
        "height": "64",
        "num_frames": "17",
        "fps_num": "8",
        "fps_den": "1",
        "seed": "7",
        "steps": "4",
        "guidance_scale": "5.0",
        "flow_shift": "3.0",
        "model": "tiny",
        "preset": "exact",
        "crf": "18",
        "encoder_preset": "medium",
    }
    text = "".join(f"{name}:{len(value.encode())}:{value}\n" for name, value in settings.items())
    columns = {"prompt": ["a é"], "seed": [7]}
    assert fingerprint(tmp_path, columns) == sha256(text.encode()).hexdigest()


BASE = {
    "id": ["a"],
    "prompt": ["p"],
    "negative_prompt": ["n"],
    "width": [64],
    "height": [96],
    "num_frames": [17],
    "fps": [8.0],
    "seed": [1],
    "steps": [4],
    "guidance_scale": [5.0],
    "guidance_scale_2": [3.0],
    "flow_shift": [3.0],
    "model": ["moe"],
}
OTHER: dict[str, Any] = {
    "prompt": ["q"],
    "negative_prompt": [""],
    "width": [66],
    "height": [98],
    "num_frames": [16],
    "fps": [8.5],
    "seed": [2],
    "steps": [5],
    "guidance_scale": [5.5],
    "guidance_scale_2": [3.5],
    "flow_shift": [2.0],
}


@pytest.mark.parametrize("column", OTHER)
def test_every_setting_changes_the_fingerprint(tmp_path: Path, column: str) -> None:
    assert fingerprint(tmp_path, BASE) != fingerprint(tmp_path, BASE | {column: OTHER[column]})


@pytest.mark.parametrize(("name", "value"), [("crf", 20), ("encoder_preset", "slow")])
def test_every_flag_of_the_encoder_changes_the_fingerprint(tmp_path: Path, name: str, value: Any) -> None:
    assert fingerprint(tmp_path, BASE) != fingerprint(tmp_path, BASE, **{name: value})


def test_the_model_name_changes_the_fingerprint(tmp_path: Path) -> None:
    assert fingerprint(tmp_path, {"seed": [1], "model": ["moe"]}) != fingerprint(tmp_path, {"seed": [1]})


@pytest.mark.parametrize(
    ("column", "value"), [("id", ["b"]), ("priority", [9]), ("price", [1.0]), ("customer", ["acme"])]
)
def test_what_does_not_decide_the_picture_is_not_in_it(tmp_path: Path, column: str, value: Any) -> None:
    assert fingerprint(tmp_path, BASE) == fingerprint(tmp_path, BASE | {column: value})


def test_defaults_spelled_out_ask_for_the_same(tmp_path: Path) -> None:
    spelled = {
        "width": [64],
        "height": ["64"],
        "fps": ["8/1"],
        "guidance_scale": [5],
        "negative_prompt": ["blurry"],
    }
    columns = {"id": ["a"], "prompt": ["p"]}
    assert fingerprint(tmp_path, columns) == fingerprint(tmp_path, columns | spelled)


def test_a_negative_zero_is_a_zero(tmp_path: Path) -> None:
    zero, minus = ({"id": ["a"], "guidance_scale": [value]} for value in (0.0, -0.0))
    assert fingerprint(tmp_path, zero) == fingerprint(tmp_path, minus)


def test_text_cannot_move_between_settings(tmp_path: Path) -> None:
    one = {"id": ["a"], "prompt": ["p\nnegative_prompt:1:n"], "negative_prompt": [""]}
    two = {"id": ["a"], "prompt": ["p"], "negative_prompt": ["n"]}
    assert fingerprint(tmp_path, one) != fingerprint(tmp_path, two)


# ---- derived ids -------------------------------------------------------------------------------------


def test_equal_rows_without_ids_are_two_jobs(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"prompt": ["same", "other", "same", "same"]})
    ids = reading.jobs["id"].to_pylist()
    assert ids[2:] == [f"{ids[0]}-2", f"{ids[0]}-3"]
    assert len(set(ids)) == 4
    assert len(ids[0]) == len("h-") + 16
    assert len(set(reading.jobs["seed"].to_pylist())) == 4


def test_a_derived_id_is_the_documented_hash(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"seed": ["42"], "prompt": ["a é"], "width": [None]})
    text = "prompt:4:a é\nseed:2:42\n"
    assert reading.jobs["id"].to_pylist() == ["h-" + sha256(text.encode()).hexdigest()[:16]]


def id_of(folder: Path, columns: dict[str, Any], **changes: Any) -> str:
    (value,) = read_columns(folder, {"prompt": ["p"]} | columns, **changes).jobs["id"].to_pylist()
    return str(value)


@pytest.mark.parametrize(
    "columns",
    [
        {"price": [2.0]},
        {"priority": [3]},
        {"customer": ["acme"]},
        {"id": pa.nulls(1, pa.string())},
        {"width": pa.nulls(1, pa.int32())},
        {"image": pa.nulls(1)},
    ],
    ids=lambda columns: next(iter(columns)),
)
def test_a_derived_id_ignores_what_shows_nothing(tmp_path: Path, columns: dict[str, Any]) -> None:
    assert id_of(tmp_path, columns) == id_of(tmp_path, {})


def test_a_derived_id_ignores_flags(tmp_path: Path) -> None:
    assert id_of(tmp_path, {}, crf=30, model="moe") == id_of(tmp_path, {})


@pytest.mark.parametrize(
    "column",
    ["width", "num_frames", "fps", "seed", "steps", "guidance_scale", "duration", "resolution"],
)
def test_a_derived_id_holds_every_pixel_column(tmp_path: Path, column: str) -> None:
    values: dict[str, Any] = {"resolution": ["64x64"], "duration": [1.0]} | OTHER
    assert id_of(tmp_path, {column: values[column]}) != id_of(tmp_path, {})


def test_a_derived_id_does_not_depend_on_the_column_type_or_order(tmp_path: Path) -> None:
    one = id_of(tmp_path, {"seed": [1], "width": [64.0], "fps": ["24"]})
    two = id_of(tmp_path, {"fps": [24.0], "width": ["64"], "seed": pa.array([1], pa.uint8())})
    assert one == two


def test_derived_ids_step_past_explicit_ones(tmp_path: Path) -> None:
    derived = id_of(tmp_path, {})
    reading = read_columns(tmp_path, {"prompt": ["x", "p", "p"], "id": [derived, None, None]})
    assert reading.jobs["id"].to_pylist() == [derived, f"{derived}-2", f"{derived}-3"]
    reading = read_columns(tmp_path, {"prompt": ["x", "p", "p"], "id": [f"{derived}-2", None, None]})
    ids = reading.jobs["id"].to_pylist()
    assert len(set(ids)) == 3


def test_repeats_are_counted_over_all_parts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pq.write_table(pa.table({"prompt": ["same"]}), tmp_path / f"{name}.parquet")
    ids = read_file(tmp_path).jobs["id"].to_pylist()
    assert ids[1] == f"{ids[0]}-2"


def test_a_derived_seed_is_63_bits_of_the_hash_of_the_id(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"id": ["clip é", "b"], "seed": [None, 5]})
    digest = sha256("clip é".encode()).digest()
    assert by_row(reading, "seed") == {0: int.from_bytes(digest[:8], "big") >> 1, 1: 5}


def test_reading_twice_gives_the_same_table(tmp_path: Path) -> None:
    columns = {"prompt": ["a", "b", "a"], "width": [64, 250, 64], "customer": ["x", None, "y"]}
    assert read_columns(tmp_path, columns).jobs.equals(read_columns(tmp_path, columns).jobs)
    assert SETTINGS.tags == frozenset()
