from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manifests.errors import DuplicateIds, ManifestError, MissingColumn, ModelError, UnknownColumn, UsageError
from manifests.job import Weights
from manifests.reader import read_manifest
from manifests.table import JOBS_SCHEMA, REJECTED_SCHEMA
from tests.manifest_cases import SETTINGS, SPEC, by_row, model_spec, read_columns, read_file, verdicts


def test_a_prompt_alone_takes_every_default(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"prompt": ["a red circle"]})
    assert reading.jobs.schema.equals(JOBS_SCHEMA)
    assert reading.rejected.schema.equals(REJECTED_SCHEMA)
    (row,) = reading.jobs.to_pylist()
    assert row["id"].startswith("h-")
    assert row | {"id": "", "fingerprint": "", "seed": 0, "file": ""} == {
        "file": "",
        "row": 0,
        "id": "",
        "fingerprint": "",
        "prompt": "a red circle",
        "negative_prompt": "blurry",
        "width": 64,
        "height": 64,
        "num_frames": 17,
        "fps_num": 8,
        "fps_den": 1,
        "seed": 0,
        "steps": 4,
        "guidance_scale": 5.0,
        "guidance_scale_2": None,
        "flow_shift": 3.0,
        "preset": "exact",
        "model": "tiny",
        "model_revision": "rev-1",
        "crf": 18,
        "encoder_preset": "medium",
        "render_width": 64,
        "render_height": 64,
        "render_frames": 17,
        "priority": 0,
        "price": None,
        "warning": None,
        "tags": [],
        "lora": None,
    }
    assert reading.notes == ()


def test_one_bad_row_leaves_the_others(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"id": list("abcdef"), "width": [64, 64, 64, 0, 64, 64]})
    assert verdicts(reading) == {0: "ok", 1: "ok", 2: "ok", 3: "width", 4: "ok", 5: "ok"}
    (rejected,) = reading.rejected.to_pylist()
    assert (rejected["id"], rejected["value"]) == ("d", "0")
    assert "even" in rejected["reason"]
    assert rejected["file"].endswith("manifest.parquet")


def test_a_row_with_two_faults_is_rejected_once(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"width": [65], "height": [67], "seed": [-1]})
    assert reading.rejected.num_rows == 1
    assert reading.jobs.num_rows == 0


@pytest.mark.parametrize("prompt", [None, "", "  \n "])
def test_a_row_without_a_prompt_is_rejected(tmp_path: Path, prompt: str | None) -> None:
    reading = read_columns(tmp_path, {"prompt": ["a", prompt]})
    assert verdicts(reading) == {0: "ok", 1: "prompt"}


def test_an_empty_negative_prompt_is_not_a_missing_one(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"negative_prompt": ["", None, "text"]})
    assert reading.jobs["negative_prompt"].to_pylist() == ["", "blurry", "text"]


def invalid_utf8(*values: bytes | None) -> pa.Array:
    return pa.array(values, pa.binary()).view(pa.string())


@pytest.mark.parametrize(
    "column", ["prompt", "id", "negative_prompt", "model", "preset", "resolution", "customer"]
)
@pytest.mark.parametrize("dictionary", [False, True])
def test_invalid_utf8_rejects_only_its_row(tmp_path: Path, column: str, dictionary: bool) -> None:
    good = {"model": b"tiny", "preset": b"exact", "resolution": b"64x64"}.get(column)
    values = invalid_utf8(good or b"one", b"\xff\xfe", good or b"three")
    if dictionary:
        values = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int8()), values)
    path = tmp_path / "manifest.parquet"
    prompts = {"prompt": ["a", "b", "c"], "id": ["x", "y", "z"]}
    pq.write_table(pa.table(prompts | {column: values}), path)
    reading = read_file(path)
    assert verdicts(reading) == {0: "ok", 1: column, 2: "ok"}
    (rejected,) = reading.rejected.to_pylist()
    assert rejected["value"] == r"b'\xff\xfe'"
    assert "UTF-8" in rejected["reason"]


def test_lone_surrogates_are_not_utf8(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"prompt": invalid_utf8(b"ok", b"\xed\xa0\x80")})
    assert verdicts(reading) == {0: "ok", 1: "prompt"}


# ---- empty manifests ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([("id", pa.null()), ("prompt", pa.null())]),
        pa.schema([("id", pa.string()), ("prompt", pa.large_string()), ("seed", pa.int64())]),
        pa.schema([("id", pa.null()), ("width", pa.list_(pa.int8()))]),
        pa.schema([]),
    ],
    ids=["null types", "usual types", "odd types", "no columns"],
)
def test_no_rows_are_no_jobs(tmp_path: Path, schema: pa.Schema) -> None:
    path = tmp_path / "empty.parquet"
    pq.write_table(schema.empty_table(), path)
    reading = read_file(path)
    assert (reading.jobs.num_rows, reading.rejected.num_rows) == (0, 0)
    assert reading.jobs.schema.equals(JOBS_SCHEMA)
    assert reading.notes == (f"no rows in `{path}`",)


def test_an_empty_part_does_not_disturb_the_others(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": pa.nulls(0), "prompt": pa.nulls(0)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["x"], "seed": [1]}), tmp_path / "b.parquet")
    assert read_file(tmp_path).jobs.num_rows == 1


# ---- models, presets, columns of later versions ------------------------------------------------------


def test_an_unknown_default_model_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model: none"):
        read_columns(tmp_path, {"seed": [1]}, model="none")


def test_rows_choose_their_model(tmp_path: Path) -> None:
    names = ["moe", None, "none", "https://hub/x", " ", "tiny"]
    reading = read_columns(tmp_path, {"model": names})
    assert by_row(reading, "model") == {0: "moe", 1: "tiny", 5: "tiny"}
    assert by_row(reading, "model_revision") == {0: "rev-2", 1: "rev-1", 5: "rev-1"}
    assert by_row(reading, "guidance_scale_2") == {0: 3.5, 1: None, 5: None}
    assert by_row(reading, "fps_num") == {0: 16, 1: 8, 5: 8}
    reasons = {row["row"]: row["reason"] for row in reading.rejected.to_pylist()}
    assert reasons[2] == "no such model: none"
    assert "not supported yet" in reasons[3]
    assert "empty" in reasons[4]


def test_each_model_is_looked_up_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def counting(weights: Weights) -> Any:
        asked.append(weights.model)
        return model_spec(weights)

    path = tmp_path / "m.parquet"
    count = 70_000
    pq.write_table(pa.table({"prompt": pa.repeat("a", count), "model": pa.repeat("none", count)}), path)
    reading = read_manifest(str(path), settings=SETTINGS, model_spec=counting)
    assert sorted(asked) == ["none", "tiny"]
    assert reading.rejected.num_rows == count


def test_presets(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"preset": ["exact", None, "fast", "turbo", "fp8", "best", ""]})
    assert verdicts(reading) == {0: "ok", 1: "ok", 2: "ok", 3: "ok", 4: "ok", 5: "preset", 6: "preset"}
    assert all("exact, fast, turbo" in reason for reason in reading.rejected["reason"].to_pylist())


@pytest.mark.parametrize("preset", ["Fast", "nonsense"])
def test_an_unusable_default_preset_is_raised(tmp_path: Path, preset: str) -> None:
    with pytest.raises(UsageError, match=preset):
        read_columns(tmp_path, {"seed": [1]}, preset=preset)


def test_columns_of_later_versions_must_be_null(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"image": ["x.png", None]})
    assert verdicts(reading) == {0: "image", 1: "ok"}
    assert "not supported yet" in reading.rejected["reason"][0].as_py()


def test_an_all_null_struct_of_images_is_fine(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    assert verdicts(read_columns(tmp_path, {"image": pa.nulls(2, kind)})) == {0: "ok", 1: "ok"}


def test_second_guidance_needs_a_second_expert(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"model": ["moe", "tiny", "tiny"], "guidance_scale_2": [2.0, 2.0, None]})
    assert verdicts(reading) == {0: "ok", 1: "guidance_scale_2", 2: "ok"}
    assert by_row(reading, "guidance_scale_2") == {0: 2.0, 2: None}


# ---- prompts longer than the encoder reads -----------------------------------------------------------


def test_a_long_prompt_is_warned_of_with_its_count(tmp_path: Path) -> None:
    prompt = "word " * 598 + "red balloon"
    reading = read_columns(tmp_path, {"prompt": [prompt, "short"], "negative_prompt": [None, "no " * 30]})
    warnings = reading.jobs["warning"].to_pylist()
    assert warnings == [
        "prompt has 600 tokens, the encoder reads 20: the rest is cut",
        "negative_prompt has 30 tokens, the encoder reads 20: the rest is cut",
    ]


def test_only_prompts_with_enough_bytes_are_tokenised(tmp_path: Path) -> None:
    seen: list[str] = []

    def count(prompts: Any) -> list[int]:
        seen.extend(prompts)
        return [1 for _ in prompts]

    path = tmp_path / "m.parquet"
    pq.write_table(pa.table({"prompt": ["x" * 20, "y" * 21, "é" * 11]}), path)
    spec = replace(SPEC, count_tokens=count)
    reading = read_manifest(str(path), settings=SETTINGS, model_spec=lambda name: spec)
    assert seen == ["y" * 21, "é" * 11]
    assert reading.jobs["warning"].null_count == 3


# ---- ids ---------------------------------------------------------------------------------------------


def test_duplicate_ids_name_both_rows(tmp_path: Path) -> None:
    with pytest.raises(DuplicateIds) as caught:
        read_columns(tmp_path, {"id": ["a", "b", "a"]})
    path = tmp_path / "manifest.parquet"
    assert f"`a` in {path} row 0 and {path} row 2" in caught.value.message
    assert caught.value.exit_code == 2


def test_equal_rows_with_one_id_are_duplicates_too(tmp_path: Path) -> None:
    with pytest.raises(DuplicateIds):
        read_columns(tmp_path, {"id": ["a", "a"], "prompt": ["same", "same"]})


def test_duplicates_across_parts_name_both_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        pq.write_table(pa.table({"id": ["a"], "prompt": [name]}), tmp_path / f"{name}.parquet")
    with pytest.raises(DuplicateIds, match=r"one\.parquet row 0 and .*two\.parquet row 0"):
        read_file(tmp_path)


def test_ids_are_compared_in_composed_form(tmp_path: Path) -> None:
    with pytest.raises(DuplicateIds, match=r"row 0 and .* row 1"):
        read_columns(tmp_path, {"id": ["caf\u00e9", "cafe\u0301"]})
    reading = read_columns(tmp_path, {"id": ["cafe\u0301"]})
    assert reading.jobs["id"].to_pylist() == ["caf\u00e9"]


def test_a_rejected_row_still_holds_its_id(tmp_path: Path) -> None:
    with pytest.raises(DuplicateIds):
        read_columns(tmp_path, {"id": ["a", "a"], "width": [64, 65]})


def test_many_duplicates_are_counted_not_listed(tmp_path: Path) -> None:
    with pytest.raises(DuplicateIds) as caught:
        read_columns(tmp_path, {"id": [f"id{row % 100}" for row in range(1000)]})
    assert "and 97 more ids" in caught.value.message
    assert len(caught.value.message) < 2000


HOSTILE_IDS = ["a/b", "../x", "-rf", "a:b", "p%04d", "a\nb", "a\tb", "CON", ".", "字" * 90, "😀" * 10, " "]


def test_hostile_ids_pass_unchanged(tmp_path: Path) -> None:
    assert read_columns(tmp_path, {"id": HOSTILE_IDS}).jobs["id"].to_pylist() == HOSTILE_IDS


@pytest.mark.parametrize("id", ["", "a\0b", "x" * 1025])
def test_ids_that_cannot_name_a_clip_are_rejected(tmp_path: Path, id: str) -> None:
    assert verdicts(read_columns(tmp_path, {"id": [id, "good"]})) == {0: "id", 1: "ok"}


def test_a_prompt_of_emoji_is_a_prompt(tmp_path: Path) -> None:
    assert read_columns(tmp_path, {"prompt": ["🎈" * 300]}).jobs.num_rows == 1


# ---- columns of a file -------------------------------------------------------------------------------


def test_other_columns_become_tags(tmp_path: Path) -> None:
    reading = read_columns(
        tmp_path,
        {
            "customer": ["acme", None, "globex"],
            "campaign": pa.array([7, None, 8], pa.int64()),
            "live": [True, None, False],
            "width": [64, 64, 65],
        },
    )
    assert [dict(tags) for tags in reading.jobs["tags"].to_pylist()] == [
        {"customer": "acme", "campaign": "7", "live": "true"},
        {},
    ]
    assert dict(reading.rejected["tags"][0].as_py()) == {
        "customer": "globex",
        "campaign": "8",
        "live": "false",
    }


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("guidence_scale", "guidance_scale"),
        ("negativ_prompt", "negative_prompt"),
        ("prompts", "prompt"),
        ("Prompt", "prompt"),
        ("num_frame", "num_frames"),
        ("numFrames", "num_frames"),
        ("num-frames", "num_frames"),
        ("widht", "width"),
        ("guidance", "guidance_scale"),
        ("num_inference_steps", "steps"),
        ("Seed", "seed"),
        ("FPS", "fps"),
    ],
)
def test_a_near_miss_stops_unless_it_is_a_declared_tag(tmp_path: Path, name: str, meant: str) -> None:
    columns = {name: ["1"]}
    with pytest.raises(UnknownColumn) as caught:
        read_columns(tmp_path, columns)
    assert f"`{name}`" in caught.value.message
    assert f"`{meant}`" in caught.value.message
    assert f"--tag {name}" in str(caught.value.hint)
    reading = read_columns(tmp_path, columns, tags=frozenset({name}))
    assert dict(reading.jobs["tags"][0].as_py()) == {name: "1"}


@pytest.mark.parametrize(
    "name", ["customer", "campaign", "sku", "uid", "prompt_id", "region", "batch", "notes"]
)
def test_ordinary_names_are_tags(tmp_path: Path, name: str) -> None:
    assert dict(read_columns(tmp_path, {name: ["v"]}).jobs["tags"][0].as_py()) == {name: "v"}


def test_a_misspelt_prompt_column_is_named_before_a_missing_one(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    pq.write_table(pa.table({"promt": ["a"]}), path)
    with pytest.raises(UnknownColumn, match="promt"):
        read_file(path)
    pq.write_table(pa.table({"customer": ["a"]}), path)
    with pytest.raises(MissingColumn, match=r"no `prompt` column .*customer"):
        read_file(path)


def test_a_known_column_cannot_be_declared_a_tag(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`seed`"):
        read_columns(tmp_path, {"seed": [1]}, tags=frozenset({"seed"}))


def test_a_declared_tag_that_is_not_there_is_noted(tmp_path: Path) -> None:
    assert "custmer" in read_columns(tmp_path, {"seed": [1]}, tags=frozenset({"custmer"})).notes[0]


def test_two_columns_of_one_name_stop(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), path)
    with pytest.raises(ManifestError, match=r"same name.*`prompt`"):
        read_file(path)


def test_parts_with_other_columns_stop(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "seed": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["b"]}), tmp_path / "b.parquet")
    with pytest.raises(MissingColumn, match=r"a\.parquet` has `seed`, `.*b\.parquet` has not"):
        read_file(tmp_path)


def test_parts_may_differ_in_order_and_types(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "seed": pa.array([1], pa.int8())}), tmp_path / "a.parquet")
    pq.write_table(
        pa.table({"seed": ["2"], "prompt": pa.array(["b"], pa.large_string())}), tmp_path / "b.parquet"
    )
    pq.write_table(pa.table({"seed": pa.nulls(1), "prompt": ["c"]}), tmp_path / "c.parquet")
    seeds = read_file(tmp_path).jobs["seed"].to_pylist()
    assert seeds[:2] == [1, 2]
    assert seeds[2] >= 0


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("prompt", pa.array([["a"]])),
        ("prompt", pa.array([1])),
        ("width", pa.array([{"a": 1}])),
        ("seed", pa.array([True])),
        ("fps", pa.array([[24]])),
        ("customer", pa.array([["a"]])),
        ("customer", pa.array([{"a": 1}])),
        ("duration", pa.array([True])),
        ("price", pa.array([[1.0]])),
    ],
)
def test_a_column_of_an_impossible_type_is_named(tmp_path: Path, column: str, value: pa.Array) -> None:
    with pytest.raises(ManifestError) as caught:
        read_columns(tmp_path, {column: value})
    assert f"`{column}`" in caught.value.message
    assert str(value.type).split("<")[0] in caught.value.message


# ---- strict ------------------------------------------------------------------------------------------


def test_strict_refuses_rejected_and_warned_rows(tmp_path: Path) -> None:
    columns = {"width": [64, 65, 250, 250, 250], "seed": [1, 1, 1, 1, -1]}
    assert verdicts(read_columns(tmp_path, columns)) == {0: "ok", 1: "width", 2: "ok", 3: "ok", 4: "seed"}
    with pytest.raises(ManifestError) as caught:
        read_columns(tmp_path, columns, strict=True)
    assert "rejected: 2" in caught.value.message
    assert "with a warning: 2" in caught.value.message
    assert "row 1, width `65`" in caught.value.message
    assert "and 1 more" in caught.value.message


@pytest.mark.parametrize(
    "columns",
    [{"num_frames": [15]}, {"width": [250]}, {"prompt": ["word " * 30]}, {"prompt": invalid_utf8(b"\xff")}],
    ids=["frames", "size", "tokens", "utf8"],
)
def test_strict_refuses_every_kind_of_adjustment(tmp_path: Path, columns: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        read_columns(tmp_path, columns, strict=True)


def test_strict_takes_a_flawless_manifest(tmp_path: Path) -> None:
    assert read_columns(tmp_path, {"num_frames": [17, 1]}, strict=True).jobs.num_rows == 2
