"""Makes one picture of a run's clips: `python docs/contact_sheet.py out/demo docs/demo.png`.

Reads the folder's clips.parquet, the manifest that it names, and the MP4s. For the built-in model's small
clips: each is a strip of frames from its first to its last, its prompt below. The same clips give the same
bytes. Run it where `vgbatch run` ran, as clips.parquet names the manifest as it was named there.

Shapes: F frames, H and W pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont

from pipeline.quality.i420 import to_rgb
from storage.clips import CLIPS_FILE

MAX_BYTES = 300_000
SCALE = 2
COLUMNS = 2
STRIP_WIDTH = 788  # six frames 64 wide or four 96 wide, at SCALE, and gaps
MARGIN = 28
CAPTION_HEIGHT = 34
FONT_SIZE = 22  # still to be read where a page shows the picture at half its size
PAPER, INK = (228, 231, 236), (40, 44, 52)


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A prompt and what came of it, uint8 RGB."""

    prompt: str
    video_FHW3: npt.NDArray[np.uint8]


def main(arguments: Sequence[str]) -> None:
    folder, target = map(Path, arguments)
    clips = read_clips(folder)
    if not clips:
        raise SystemExit(f"{folder} has no clips: run `make demo` first")
    contact_sheet(clips).save(target, optimize=True)
    num_bytes = target.stat().st_size
    print(f"{target}: {len(clips)} clips, {num_bytes:,} bytes")
    if num_bytes > MAX_BYTES:
        raise SystemExit(f"{target} is larger than {MAX_BYTES:,} bytes: use fewer clips")


def read_clips(folder: Path) -> list[Clip]:
    """What the folder's last run has to show, in the manifest's order."""
    rows = pq.read_table(folder / CLIPS_FILE).to_pylist() if (folder / CLIPS_FILE).is_file() else []
    there = [row for row in rows if row["status"] in ("delivered", "reused")]
    prompts = {
        file: pq.read_table(file, columns=["prompt"])["prompt"].to_pylist()
        for file in sorted({row["file"] for row in there})
    }
    return [
        Clip(prompt=prompts[row["file"]][row["row"]], video_FHW3=read_video(folder / row["path"]))
        for row in sorted(there, key=lambda row: (row["file"], row["row"]))
    ]


def read_video(path: Path) -> npt.NDArray[np.uint8]:
    """All frames, (F, H, W, 3), converted to RGB here: how ffmpeg does it depends on its version."""
    reader = imageio_ffmpeg.read_frames(
        f"file:{path}", pix_fmt="yuv420p", bits_per_pixel=12, output_params=["-fps_mode", "passthrough"]
    )
    width, height = next(reader)["size"]
    frames = [np.frombuffer(frame, np.uint8) for frame in reader]
    return to_rgb(np.stack(frames).reshape(len(frames), height * 3 // 2, width))


def contact_sheet(clips: Sequence[Clip]) -> Image.Image:
    rows = [clips[start : start + COLUMNS] for start in range(0, len(clips), COLUMNS)]
    heights = [SCALE * max(clip.video_FHW3.shape[1] for clip in row) + CAPTION_HEIGHT for row in rows]
    width = MARGIN + COLUMNS * (STRIP_WIDTH + MARGIN)
    sheet = Image.new("RGB", (width, MARGIN + sum(heights) + MARGIN * len(rows)), PAPER)
    top = MARGIN
    for row, height in zip(rows, heights, strict=True):
        for column, clip in enumerate(row):
            _draw_clip(sheet, clip, left=MARGIN + column * (STRIP_WIDTH + MARGIN), bottom=top + height)
        top += height + MARGIN
    return sheet.quantize(256, dither=Image.Dither.NONE)


def _draw_clip(sheet: Image.Image, clip: Clip, *, left: int, bottom: int) -> None:
    """Its frames and below them its caption, above `bottom`."""
    num_frames, height, width, _ = clip.video_FHW3.shape
    places = _places(SCALE * width)
    shown = min(len(places), num_frames)
    for place, index in zip(places, np.linspace(0, num_frames - 1, shown).round().astype(int), strict=False):
        frame = Image.fromarray(clip.video_FHW3[index])
        frame = frame.resize((SCALE * width, SCALE * height), Image.Resampling.NEAREST)
        sheet.paste(frame, (left + place, bottom - CAPTION_HEIGHT - SCALE * height))
    font = ImageFont.load_default(FONT_SIZE)
    caption = _fitting(" ".join(clip.prompt.split()), font)
    ImageDraw.Draw(sheet).text((left, bottom), caption, fill=INK, font=font, anchor="ld")


def _places(width: int) -> list[int]:
    """Where frames of a width stand in a strip, as many as fit, the last one at its right end."""
    assert width <= STRIP_WIDTH, width
    most = STRIP_WIDTH // width
    return np.linspace(0, STRIP_WIDTH - width, most).round().astype(int).tolist()


def _fitting(text: str, font: ImageFont.FreeTypeFont) -> str:
    """The text, cut where it would be wider than a strip."""
    if font.getlength(text) <= STRIP_WIDTH:
        return text
    while font.getlength(f"{text}...") > STRIP_WIDTH:
        text = text[:-1]
    return f"{text}..."


if __name__ == "__main__":
    main(sys.argv[1:])
