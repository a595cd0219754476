"""Final names are safe, unique and never taken from other content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manifests.errors import VideoError
from storage.metadata import ClipMetadata
from storage.paths import clip_name, list_clips, partial_name, publish, remove_partials
from tests.storage_video import write_clip

IDS = {
    "plain": "plain",
    "a/b": "a_b",
    "a\\b": "a_b",
    "../x": "x",
    "..": "clip",
    ".": "clip",
    "": "clip",
    "/": "clip",
    "-rf": "rf",
    "--": "clip",
    "a:b": "a_b",
    "p%04d": "p_04d",
    "a\nb\tc": "a_b_c",
    "a\0b": "a_b",
    "\x1b[31mred\x7f": "31mred",
    "...hidden": "hidden",
    "trailing. . ": "trailing",
    "CON": "clip-CON",
    "con.txt": "clip-con.txt",
    "lpt1": "clip-lpt1",
    "COM¹": "clip-COM1",
    "console": "console",
    "字" * 90: "clip",
    "café": "cafe",
    "cafe\u0301": "cafe",
    "🎬 take 2": "take_2",
    "\ud800": "clip",
    "x" * 5000: "x" * 133,
    "$(reboot)`'\"": "reboot",
}


@pytest.mark.parametrize("id", IDS)
def test_every_id_has_a_safe_name(id: str, tmp_path: Path) -> None:
    name = clip_name(id, "f" * 64)
    slug, digits, extension = name.rsplit(".", 2)
    assert slug == IDS[id]
    assert (len(digits), extension) == (12, "mp4")
    assert len(name.encode()) <= 150
    (tmp_path / name).touch()
    (tmp_path / partial_name(name, run_id="20261101T053000-1a2b3c")).touch()
    assert len(os.listdir(tmp_path)) == 2, "both are plain files of this very folder"


def test_names_differ_whatever_a_file_system_makes_of_their_letters() -> None:
    pairs = [(id, print_) for id in [*IDS, "PLAIN", "Café"] for print_ in ("f" * 64, "e" * 64)]
    assert len({clip_name(*pair).lower() for pair in pairs}) == len(pairs)


def test_a_name_is_the_same_every_night() -> None:
    assert clip_name("a/b", "f" * 64) == "a_b.7c2ee6540ed6.mp4"


def test_partials_are_removed_and_nothing_else(tmp_path: Path) -> None:
    name = clip_name("a", "f")
    keep = [name, ".hidden", ".something.partial", "clips.parquet", f"{name}.partial", "vgbatch.duckdb"]
    for kept in keep:
        (tmp_path / kept).touch()
    for run_id in ("r1", "r2"):
        (tmp_path / partial_name(name, run_id=run_id)).touch()
    assert remove_partials(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == sorted(keep)


def test_only_final_names_are_listed(tmp_path: Path) -> None:
    names = {clip_name(id, "f") for id in IDS}
    for name in names:
        (tmp_path / name).touch()
        (tmp_path / partial_name(name, run_id="r1")).touch()
    (tmp_path / "clips.parquet").touch()
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.mp4"))).touch()
    assert set(list_clips(tmp_path)["file"].to_pylist()) == names
    assert list_clips(tmp_path / "not yet").num_rows == 0


def test_a_partial_gets_its_final_name(tmp_path: Path) -> None:
    partial, final = tmp_path / ".p", tmp_path / "final.mp4"
    partial.write_bytes(b"clip")
    publish(partial, final)
    assert os.listdir(tmp_path) == ["final.mp4"]
    assert final.read_bytes() == b"clip"


@pytest.mark.parametrize("content", [b"a user's own notes", b"cliq", b"clip and more"])
def test_other_content_is_never_overwritten(content: bytes, tmp_path: Path) -> None:
    partial, final = tmp_path / ".p", tmp_path / "final.mp4"
    partial.write_bytes(b"clip")
    final.write_bytes(content)
    with pytest.raises(VideoError, match=r"not this clip has its name: .*final\.mp4"):
        publish(partial, final)
    assert final.read_bytes() == content
    assert partial.exists()


@pytest.mark.parametrize("content", [b"clip", b""])
def test_the_same_content_and_an_empty_file_may_be_there(content: bytes, tmp_path: Path) -> None:
    partial, final = tmp_path / ".p", tmp_path / "final.mp4"
    partial.write_bytes(b"clip")
    final.write_bytes(content)
    publish(partial, final)
    assert final.read_bytes() == b"clip"
    assert not partial.exists()


def test_a_clip_of_the_same_job_is_replaced_even_when_cut_short(tmp_path: Path) -> None:
    ours = ClipMetadata(id="a", fingerprint="f", seed=1, model="tiny")
    partial, final = tmp_path / ".p", tmp_path / "final.mp4"
    write_clip(partial, metadata=ours, num_frames=17)
    whole = partial.read_bytes()
    final.write_bytes(whole[: len(whole) * 3 // 4])
    publish(partial, final)
    assert final.read_bytes() == whole


def test_a_clip_of_another_job_is_never_overwritten(tmp_path: Path) -> None:
    ours = ClipMetadata(id="a", fingerprint="f", seed=1, model="tiny")
    theirs = ClipMetadata(id="a", fingerprint="e", seed=1, model="tiny")
    partial, final = tmp_path / ".p", tmp_path / "final.mp4"
    write_clip(final, metadata=theirs)
    write_clip(partial, metadata=ours)
    before = final.read_bytes()
    with pytest.raises(VideoError, match="not this clip"):
        publish(partial, final)
    assert final.read_bytes() == before


def test_a_folder_removed_meanwhile_is_a_video_error(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match=r"gone/final\.mp4 could not be published"):
        publish(tmp_path / "gone" / ".p", tmp_path / "gone" / "final.mp4")
