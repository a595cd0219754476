"""The README's picture of what the demo delivers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from docs import contact_sheet
from storage.clips import CLIPS_FILE
from storage.video import encode_clip
from tests.storage_video import METADATA, video_settings

PICTURE = Path(contact_sheet.__file__).with_name("demo.png")
BLACK, WHITE = 16, 235  # luma


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Of three rows the first and the last are clips, of 7 and 2 frames that go from black to white."""
    manifest = tmp_path / "manifest.parquet"
    pq.write_table(pa.table({"prompt": ["one", "not\nshown", "a very long prompt " * 20]}), manifest)
    rows = [
        {"status": "reused", "path": "c.mp4", "row": 2, "file": str(manifest)},
        {"status": "rejected", "path": None, "row": 1, "file": str(manifest)},
        {"status": "delivered", "path": "a.mp4", "row": 0, "file": str(manifest)},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / CLIPS_FILE)
    for name, width, height, num_frames in (("a.mp4", 64, 64, 7), ("c.mp4", 96, 32, 2)):
        frames = np.full((num_frames, height * 3 // 2, width), 128, np.uint8)
        frames[:, :height] = np.linspace(BLACK, WHITE, num_frames).round()[:, None, None]
        settings = video_settings(width=width, height=height, num_frames=num_frames, crf=1)
        encode_clip(frames, settings=settings, metadata=METADATA, partial=tmp_path / name)
    return tmp_path


def test_every_clip_is_a_strip_from_its_first_frame_to_its_last(out: Path) -> None:
    contact_sheet.main([str(out), str(out / "sheet.png")])
    pixels = np.asarray(Image.open(out / "sheet.png").convert("RGB")).astype(int)
    left, top = contact_sheet.MARGIN, contact_sheet.MARGIN
    bottom = top + 128
    last = left + contact_sheet.STRIP_WIDTH
    assert pixels[top:bottom, left : left + 128].max() <= 5
    assert pixels[top:bottom, last - 128 : last].min() >= 250
    assert (pixels[top:bottom, last + 1 : last + contact_sheet.MARGIN] == contact_sheet.PAPER).all()
    second = last + contact_sheet.MARGIN  # only as high as 64, so it stands lower: captions share a line
    assert (pixels[bottom - 65, second : second + 192] == contact_sheet.PAPER).all()
    assert pixels[bottom - 64 : bottom, second : second + 192].max() <= 5


def test_captions_stand_below_their_clips_and_are_cut_at_its_end(out: Path) -> None:
    sheet = contact_sheet.contact_sheet(contact_sheet.read_clips(out)).convert("RGB")
    band_top = contact_sheet.MARGIN + 128
    band = np.asarray(sheet)[band_top : band_top + contact_sheet.CAPTION_HEIGHT].astype(int)
    inked = np.abs(band - contact_sheet.PAPER).max((0, 2)) > 60
    first, second = np.split(inked, [contact_sheet.MARGIN + contact_sheet.STRIP_WIDTH + 1])
    assert 0 < first.sum() < 100  # "one"
    columns = np.flatnonzero(second)
    assert columns[0] >= contact_sheet.MARGIN - 1
    assert columns[-1] < contact_sheet.MARGIN + contact_sheet.STRIP_WIDTH
    assert len(columns) > 300


def test_the_same_clips_give_the_same_small_file(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one.png", "two.png"):
        contact_sheet.main([str(out), str(out / name)])
    assert (out / "one.png").read_bytes() == (out / "two.png").read_bytes()
    assert (out / "one.png").stat().st_size < contact_sheet.MAX_BYTES
    assert "one.png: 2 clips, " in capsys.readouterr().out


def test_a_picture_that_is_too_large_is_an_error(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact_sheet, "MAX_BYTES", 500)
    with pytest.raises(SystemExit, match="larger than 500 bytes"):
        contact_sheet.main([str(out), str(out / "sheet.png")])


def test_a_folder_without_clips_names_the_command_that_makes_them(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="run `make demo` first"):
        contact_sheet.main([str(tmp_path), str(tmp_path / "sheet.png")])


def test_the_picture_that_the_readme_shows_is_there_and_small() -> None:
    assert (
        f"]({PICTURE.relative_to(PICTURE.parents[1])})"
        in PICTURE.parents[1].joinpath("README.md").read_text()
    )
    assert PICTURE.stat().st_size <= contact_sheet.MAX_BYTES
    with Image.open(PICTURE) as picture:
        assert picture.width == 2 * contact_sheet.STRIP_WIDTH + 3 * contact_sheet.MARGIN
