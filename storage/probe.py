"""What a video file really holds, found by decoding every frame of it (there is no ffprobe here)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

from manifests.errors import VideoError
from storage.ffmpeg import Finished, complaints, failure, run_ffmpeg
from storage.metadata import ClipMetadata, read_metadata

# `  Stream #0:0[0x1](und): Video: h264 (High) (avc1 / 0x31637661), yuv420p(tv, bt709), 64x64, ...`
_STREAM = re.compile(r"^\[info\]   Stream #0:\d+[^:]*: Video: (?P<codec>\w+)(?: \((?P<profile>[^()/]+)\))?")
_THREADS = 4
_COLOUR_TAG = re.compile(r"bt|smpte|unknown|.*/")
_PIXELS = re.compile(r", (?P<pix_fmt>[a-z][a-z0-9]*)(?:\((?P<colour>[^)]*)\))?, \d+x\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoInfo:
    """num_frames: decoded. fps: exact; None when frames are unevenly spaced.

    color_range is tv or pc; these, the three colour tags and the profile are "unknown" when unsaid.
    """

    width: int
    height: int
    num_frames: int
    fps: Fraction | None
    pix_fmt: str
    color_range: str
    color_space: str
    color_primaries: str
    color_transfer: str
    codec: str
    profile: str
    metadata: ClipMetadata | None


def probe(path: Path) -> VideoInfo:
    """Decodes the first video stream of `path` to its end. Raises VideoError at the first damaged frame."""
    if not path.is_file():
        raise VideoError(f"no such video file: {path}")
    frames = "-map 0:v:0 -fps_mode passthrough -enc_time_base demux -f framecrc pipe:1"
    options = f"-loglevel level+info -xerror -threads {_THREADS} -i"
    finished = run_ffmpeg([*options.split(), f"file:{path}", *frames.split()])
    if finished.exit_code != 0 or complaints(finished):
        raise failure(finished, doing="decoding")
    width, height = _size(finished.output)
    return VideoInfo(
        width=width,
        height=height,
        num_frames=len(_packets(finished.output)),
        fps=_fps(finished.output),
        **_stream(finished),
        metadata=read_metadata(path),
    )


def _stream(finished: Finished) -> dict[str, str]:
    streams = [match for line in finished.messages if (match := _STREAM.match(line))]
    pixels = _PIXELS.search(streams[0].string) if streams else None
    if pixels is None:
        raise VideoError("ffmpeg does not say what the video stream is", hint="is its format a usual one?")
    stream = streams[0]
    words = [word.strip() for word in (pixels["colour"] or "").split(",")]
    tag = next((word for word in words if _COLOUR_TAG.match(word)), "unknown")
    # One name stands for all three when they agree.
    space, primaries, transfer = tag.split("/") if "/" in tag else [tag] * 3
    return {
        "codec": stream["codec"],
        "profile": stream["profile"] or "unknown",
        "pix_fmt": pixels["pix_fmt"],
        "color_range": next((word for word in words if word in ("tv", "pc")), "unknown"),
        "color_space": space,
        "color_primaries": primaries,
        "color_transfer": transfer,
    }


def _header(output: list[str], name: str) -> str:
    """The value of a framecrc header line: `#dimensions 0: 64x64`."""
    return next(line.split(": ", 1)[1] for line in output if line.startswith(f"#{name} 0: "))


def _size(output: list[str]) -> tuple[int, int]:
    width, height = _header(output, "dimensions").split("x")
    return int(width), int(height)


def _packets(output: list[str]) -> list[tuple[int, int]]:
    """(time, duration) of each decoded frame, in units of the time base."""
    rows = [line.split(",") for line in output if line and not line.startswith("#")]
    return [(int(row[2]), int(row[3])) for row in rows]


def _fps(output: list[str]) -> Fraction | None:
    packets = _packets(output)
    steps = {after - before for (before, _), (after, _) in pairwise(packets)}
    steps |= {duration for _, duration in packets}
    if len(steps) != 1 or (step := steps.pop()) <= 0:
        return None
    return 1 / (step * Fraction(_header(output, "tb").strip()))
