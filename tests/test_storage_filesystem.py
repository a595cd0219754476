"""Folders are made and proved before work starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from manifests.errors import UsageError
from storage.filesystem import free_bytes, require_writable


def test_a_folder_is_made_with_its_parents_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    require_writable(folder)
    require_writable(folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("folder", ["file", "file/below", "x" * 300])
def test_a_folder_that_cannot_be_written_is_named(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UsageError, match=folder) as caught:
        require_writable(tmp_path / folder)
    assert caught.value.hint


def test_free_space_of_a_folder_not_yet_made_is_that_of_its_disk(tmp_path: Path) -> None:
    disk = shutil.disk_usage(tmp_path)
    assert 0 < free_bytes(tmp_path / "not" / "yet") <= disk.total
