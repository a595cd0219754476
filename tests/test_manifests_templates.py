from __future__ import annotations

import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manifests.errors import DuplicateIds, UnknownColumn, UnreadableManifest, UsageError
from manifests.names import RULES
from manifests.reader import Reading
from manifests.templates import convert_csv, convert_jsonl, template_text, write_template
from tests.manifest_cases import SETTINGS, by_row, model_spec, read_file, verdicts

BIG = 4873214862074861313


def convert(how: Callable[..., Reading], source: Path, text: str | bytes, **changes: Any) -> Reading:
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    target = source.with_suffix(".parquet")
    return how(str(source), str(target), settings=SETTINGS, model_spec=model_spec, **changes)


def same(one: Reading, two: Reading) -> bool:
    return one.jobs.drop_columns(["file"]).equals(two.jobs.drop_columns(["file"]))


# ---- template ----------------------------------------------------------------------------------------


def test_the_template_is_a_manifest_that_describes_itself(tmp_path: Path) -> None:
    path = tmp_path / "example.parquet"
    assert write_template(str(path)) == template_text()
    for field in pq.read_schema(path):
        assert field.metadata[b"description"]
    reading = read_file(path)
    assert reading.rejected.num_rows == 0
    assert reading.jobs.num_rows == 3


def test_the_listing_has_every_column() -> None:
    lines = template_text().splitlines()
    for name, rule in RULES.items():
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert rule.about in line


def test_a_template_does_not_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "example.parquet"
    path.write_text("mine")
    with pytest.raises(UsageError, match=r"already there: .*example\.parquet"):
        write_template(str(path))
    assert path.read_text() == "mine"
    write_template(str(path), overwrite=True)
    assert read_file(path).jobs.num_rows == 3


# ---- CSV ---------------------------------------------------------------------------------------------

CSV = f"""id,prompt,seed,width,fps,price,negative_prompt,customer
007,"a ""red"" circle,
moving",{BIG},96,24000/1001,0.10,"",0042
,plain,,,,,,
"""


def test_csv_keeps_every_digit(tmp_path: Path) -> None:
    reading = convert(convert_csv, tmp_path / "m.csv", CSV)
    assert by_row(reading, "seed")[0] == BIG
    assert by_row(reading, "id")[0] == "007"
    assert by_row(reading, "prompt") == {0: 'a "red" circle,\nmoving', 1: "plain"}
    assert by_row(reading, "negative_prompt") == {0: "", 1: "blurry"}
    assert by_row(reading, "price") == {0: Decimal("0.1"), 1: None}
    assert by_row(reading, "tags") == {0: [("customer", "0042")], 1: []}
    table = pq.read_table(tmp_path / "m.parquet")
    assert table["seed"].to_pylist() == [BIG, None]
    assert table.schema.field("seed").type == pa.int64()
    assert table.schema.field("width").type == pa.int64()
    assert table.schema.field("price").type == pa.decimal128(18, 6)
    assert table.schema.field("id").type == pa.string()
    assert same(reading, read_file(tmp_path / "m.parquet"))


def test_csv_of_a_spreadsheet(tmp_path: Path) -> None:
    text = "\ufeffprompt,width\r\nein Kreis,96\r\nzwei,\r\n".encode()
    assert by_row(convert(convert_csv, tmp_path / "m.csv", text), "width") == {0: 96, 1: 64}


def test_a_wrong_row_is_reported_and_written(tmp_path: Path) -> None:
    text = "prompt,seed,width\na,1,64\nb,x,64\nc,3,65\nd,9007199254740993,64\n"
    reading = convert(convert_csv, tmp_path / "m.csv", text)
    assert verdicts(reading) == {0: "ok", 1: "seed", 2: "width", 3: "ok"}
    assert reading.rejected["file"][0].as_py().endswith("m.csv")
    assert by_row(reading, "seed") == {0: 1, 3: 9007199254740993}
    written = read_file(tmp_path / "m.parquet")
    assert verdicts(written) == verdicts(reading)
    assert same(written, reading)


def test_csv_with_invalid_utf8_rejects_the_row(tmp_path: Path) -> None:
    reading = convert(convert_csv, tmp_path / "m.csv", b"prompt,seed\ngood,1\n\xff\xfe,2\n")
    assert verdicts(reading) == {0: "ok", 1: "prompt"}
    assert verdicts(read_file(tmp_path / "m.parquet")) == {0: "ok", 1: "prompt"}


def test_csv_with_only_a_header_is_no_jobs(tmp_path: Path) -> None:
    assert convert(convert_csv, tmp_path / "m.csv", "id,prompt\n").jobs.num_rows == 0
    assert read_file(tmp_path / "m.parquet").jobs.num_rows == 0


# ---- JSON lines --------------------------------------------------------------------------------------


def test_jsonl_keeps_every_digit(tmp_path: Path) -> None:
    text = (
        f'{{"id": "007", "prompt": "a", "seed": {BIG}, "price": 0.10, "guidance_scale": 7.1}}\n'
        "\n"
        '{"prompt": "2026-11-01", "customer": "2026-11-01", "live": true, "sku": 12345678901234567890}\n'
        '{"prompt": "c", "seed": null, "width": 96}\n'
    )
    reading = convert(convert_jsonl, tmp_path / "m.jsonl", text)
    assert by_row(reading, "seed")[0] == BIG
    assert by_row(reading, "id")[0] == "007"
    assert by_row(reading, "prompt")[1] == "2026-11-01"
    assert by_row(reading, "price")[0] == Decimal("0.1")
    assert by_row(reading, "guidance_scale") == {0: 7.1, 1: 5.0, 2: 5.0}
    assert by_row(reading, "width")[2] == 96
    tags = [("customer", "2026-11-01"), ("live", "true"), ("sku", "12345678901234567890")]
    assert by_row(reading, "tags") == {0: [], 1: tags, 2: []}
    table = pq.read_table(tmp_path / "m.parquet")
    assert table.column_names == [
        "id", "prompt", "seed", "price", "guidance_scale", "customer", "live", "sku", "width",
    ]  # fmt: skip
    assert table["seed"].to_pylist() == [BIG, None, None]
    assert same(reading, read_file(tmp_path / "m.parquet"))


def test_jsonl_and_csv_of_the_same_rows_are_the_same_jobs(tmp_path: Path) -> None:
    one = convert(convert_csv, tmp_path / "a.csv", "prompt,seed,fps\nx,5,23.976\n")
    two = convert(convert_jsonl, tmp_path / "b.jsonl", '{"prompt": "x", "fps": 23.976, "seed": 5}')
    assert same(one, two)


def test_jsonl_that_is_not_text_rejects_the_row(tmp_path: Path) -> None:
    lines = b'{"prompt": "good"}\n{"prompt": "\xff"}\n{"prompt": "\\ud800"}\n'
    assert verdicts(convert(convert_jsonl, tmp_path / "m.jsonl", lines)) == {
        0: "ok",
        1: "prompt",
        2: "prompt",
    }


@pytest.mark.parametrize(
    "line", ["{", "[1]", '"text"', '{"prompt": ["a"]}', '{"prompt": {"a": 1}}', "prompt"]
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(UnreadableManifest, match=r"m\.jsonl line 2"):
        convert(convert_jsonl, tmp_path / "m.jsonl", '{"prompt": "a"}\n' + line + "\n")
    assert not (tmp_path / "m.parquet").exists()


# ---- both --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("id,prompt\na,x\na,y\n", DuplicateIds),
        ("prompt,guidence_scale\nx,1\n", UnknownColumn),
        ("prompt,seed\nx\n", UnreadableManifest),
        ("", UnreadableManifest),
        (b"\xff\xfe,prompt\n1,2\n", UnreadableManifest),
    ],
    ids=["duplicate ids", "unknown column", "ragged", "empty", "header"],
)
def test_a_manifest_that_cannot_run_is_not_written(
    tmp_path: Path, text: str | bytes, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"m\.csv"):
        convert(convert_csv, tmp_path / "m.csv", text)
    assert os.listdir(tmp_path) == ["m.csv"]


@pytest.mark.parametrize(("how", "text"), [(convert_csv, "prompt\na\n"), (convert_jsonl, '{"prompt": "a"}')])
def test_converting_never_overwrites_unasked(tmp_path: Path, how: Callable[..., Reading], text: str) -> None:
    target = tmp_path / "m.parquet"
    target.write_text("mine")
    with pytest.raises(UsageError, match="already there"):
        convert(how, tmp_path / "m.txt", text)
    assert target.read_text() == "mine"
    assert convert(how, tmp_path / "m.txt", text, overwrite=True).jobs.num_rows == 1
    assert read_file(target).jobs.num_rows == 1
    assert sorted(os.listdir(tmp_path)) == ["m.parquet", "m.txt"]


def test_a_missing_source_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableManifest, match=r"none\.csv"):
        convert_csv(
            str(tmp_path / "none.csv"), str(tmp_path / "m.parquet"), settings=SETTINGS, model_spec=model_spec
        )
    with pytest.raises(UsageError, match="nowhere"):
        write_template(str(tmp_path / "nowhere" / "m.parquet"))
