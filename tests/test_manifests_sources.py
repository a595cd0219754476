from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manifests.errors import UnreadableManifest
from tests.manifest_cases import read_file

GOOD = pa.table({"prompt": [f"a circle {row}" for row in range(50)], "seed": list(range(50))})


def write(path: Path, table: pa.Table = GOOD) -> Path:
    pq.write_table(table, path)
    return path


def broken(folder: Path, kind: str) -> Path:
    path = folder / "broken.parquet"
    whole = write(folder / "whole.parquet").read_bytes()
    (folder / "whole.parquet").unlink()
    match kind:
        case "empty":
            path.write_bytes(b"")
        case "half":
            path.write_bytes(whole[: len(whole) // 2])
        case "csv":
            path.write_text("prompt,seed\na,1\n")
        case "footer of garbage":
            path.write_bytes(whole[:-30] + b"x" * 26 + b"PAR1")
        case "garbage in a page":
            path.write_bytes(whole[:4] + b"\xff" * 200 + whole[204:])
        case "magic only":
            path.write_bytes(b"PAR1")
        case "encrypted":
            path.write_bytes(b"PARE" + whole[4:])
        case "a loop of links":
            path.symlink_to(path)
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("empty", "0 bytes"),
        ("half", "truncated"),
        ("csv", "not a Parquet file"),
        ("footer of garbage", "Parquet"),
        ("garbage in a page", "Parquet"),
        ("magic only", "truncated"),
        ("encrypted", "encrypted"),
        ("a loop of links", "broken.parquet"),
        ("missing", "no such file"),
    ],
)
def test_a_file_that_is_not_whole_parquet_is_named(tmp_path: Path, kind: str, said: str) -> None:
    path = broken(tmp_path, kind)
    with pytest.raises(UnreadableManifest) as caught:
        read_file(path)
    assert str(path) in caught.value.message
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "secret.parquet")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    # Root may read everything, so the refusal is put in where the file is opened.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UnreadableManifest, match=r"Permission denied.*secret\.parquet"):
        read_file(path)


def test_one_broken_part_stops_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"")
    with pytest.raises(UnreadableManifest, match=r"b\.parquet"):
        read_file(tmp_path)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no manifest here")
    with pytest.raises(UnreadableManifest, match=str(tmp_path)):
        read_file(tmp_path)


def test_a_glob_that_matches_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableManifest, match=r"no file matches: .*\*\.parquet"):
        read_file(tmp_path / "*.parquet")


@pytest.mark.parametrize("url", ["s3://bucket/m.parquet", "gs://b/m.parquet", "https://h/m.parquet"])
def test_a_url_is_refused(url: str) -> None:
    with pytest.raises(UnreadableManifest, match=f"not supported yet: {url}"):
        read_file(url)


def test_a_folder_is_read_by_name_without_hidden_files(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", GOOD.slice(0, 2))
    write(tmp_path / "a.parquet", GOOD.slice(2, 1))
    (tmp_path / ".half-written.parquet").write_bytes(b"PAR1")
    jobs = read_file(tmp_path).jobs
    assert [Path(file).name for file in jobs["file"].to_pylist()] == ["a.parquet", "b.parquet", "b.parquet"]
    assert jobs["row"].to_pylist() == [0, 0, 1]
    assert jobs["seed"].to_pylist() == [2, 0, 1]


def test_a_glob_takes_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "day2").mkdir()
    write(tmp_path / "day1", GOOD.slice(0, 1))
    write(tmp_path / "day2" / "part.parquet", GOOD.slice(1, 1))
    assert read_file(tmp_path / "day*").jobs["seed"].to_pylist() == [0, 1]


def test_a_name_with_brackets_is_a_file_before_it_is_a_glob(tmp_path: Path) -> None:
    assert read_file(write(tmp_path / "night[1].parquet")).jobs.num_rows == 50


def test_rows_are_counted_over_batches(tmp_path: Path) -> None:
    count = 70_000
    table = pa.table({"prompt": pa.repeat("same", count), "id": [f"r{row}" for row in range(count)]})
    jobs = read_file(write(tmp_path / "m.parquet", table)).jobs
    assert jobs["row"].to_pylist() == list(range(count))
    assert jobs["id"][count - 1].as_py() == f"r{count - 1}"
