"""Frames become an MP4 that was decoded and compared with what was asked for before anyone may use it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from manifests.errors import OutOfSpace, VideoError
from manifests.job import Job
from storage.ffmpeg import failure, run_ffmpeg
from storage.filesystem import is_out_of_space
from storage.metadata import ClipMetadata, read_metadata
from storage.probe import VideoInfo, probe

__all__ = [
    "ClipMetadata",
    "EncodedClip",
    "VideoInfo",
    "VideoSettings",
    "encode_clip",
    "is_complete",
    "probe",
    "read_metadata",
]

# A constant, because the bytes libx264 makes depend on it; 4 encode 5 s of 768p in 3.9 s (medium).
_THREADS = 4
_MAX_RATE_TERM = 1_001_000  # ffmpeg rounds rates with a larger numerator or denominator
_BT709 = "-color_range tv -colorspace bt709 -color_primaries bt709 -color_trc bt709"


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSettings:
    """What a clip must turn out to be. width, height: pixels, even. crf: 1 (best) to 51."""

    width: int
    height: int
    num_frames: int
    fps: Fraction
    crf: int = 18
    encoder_preset: str = "medium"
    codec: str = "libx264"

    @classmethod
    def of(cls, job: Job) -> VideoSettings:
        """The file that a job asks for."""
        return cls(
            width=job.width,
            height=job.height,
            num_frames=job.num_frames,
            fps=job.fps,
            crf=job.crf,
            encoder_preset=job.encoder_preset,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedClip:
    """write_s: encoding, decoding again to verify, and reaching the disk."""

    num_bytes: int
    write_s: float


def encode_clip(
    frames: npt.NDArray[np.uint8], *, settings: VideoSettings, metadata: ClipMetadata, partial: Path
) -> EncodedClip:
    """Writes `frames` to `partial` and proves the file good: every frame decodes, all is as asked.

    frames: uint8 (num_frames, height * 3 // 2, width), planar I420, BT.709, limited range.
    The same frames give the same bytes. Raises VideoError, or OutOfSpace; then `partial` is gone.
    """
    started = time.monotonic()
    _check_frames(frames, settings)
    try:
        _encode(frames, settings, metadata, partial)
        _verify(partial, settings, metadata)
        num_bytes = _sync(partial)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return EncodedClip(num_bytes=num_bytes, write_s=time.monotonic() - started)


def is_complete(path: Path, *, settings: VideoSettings) -> bool:
    """Whether `path` is a whole clip of these settings; decodes all of it."""
    try:
        return not _differences(probe(path), settings)
    except VideoError:
        return False


def _check_frames(frames: npt.NDArray[np.uint8], settings: VideoSettings) -> None:
    if settings.width % 2 or settings.height % 2 or min(settings.width, settings.height) < 2:
        raise VideoError(f"yuv420p needs an even size: {settings.width}x{settings.height}")
    if max(settings.fps.as_integer_ratio()) > _MAX_RATE_TERM:
        raise VideoError(f"ffmpeg would round the rate: {settings.fps}")
    if settings.num_frames < 1:
        raise VideoError(f"a clip needs at least one frame: {settings.num_frames}")
    shape = (settings.num_frames, settings.height * 3 // 2, settings.width)
    if frames.shape != shape or frames.dtype != np.uint8:
        raise VideoError(f"frames must be uint8 {shape}: {frames.dtype} {frames.shape}")


def _encode(
    frames: npt.NDArray[np.uint8], settings: VideoSettings, metadata: ClipMetadata, partial: Path
) -> None:
    size, rate = f"{settings.width}x{settings.height}", f"{settings.fps.numerator}/{settings.fps.denominator}"
    # -r, not -framerate: the demuxer would round 24.1 to 24.
    source = f"-f rawvideo -pix_fmt yuv420p {_BT709} -video_size {size} -r {rate} -i pipe:0"
    rate_control = f"-crf {settings.crf} -preset {settings.encoder_preset} -profile:v high"
    encoder = f"-fps_mode passthrough -c:v {settings.codec} {rate_control} -threads {_THREADS}"
    stream = f"-pix_fmt yuv420p {_BT709} -fflags +bitexact -flags:v +bitexact -map_metadata -1"
    finished = run_ffmpeg(
        [
            *f"-loglevel level+warning {source} {encoder} {stream}".split(),
            *("-metadata", f"comment={metadata.to_comment()}"),
            *("-movflags", "+faststart", "-f", "mp4", "-y", f"file:{partial}"),
        ],
        frames=_planes(frames),
    )
    if finished.exit_code != 0:
        raise failure(finished, doing="encoding")


def _planes(frames: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
    for frame in frames:
        yield np.ascontiguousarray(frame).data.cast("B")


def _verify(partial: Path, settings: VideoSettings, metadata: ClipMetadata) -> None:
    info = probe(partial)
    differences = _differences(info, settings)
    if info.metadata != metadata:
        differences.append("metadata other than that of the job")
    if differences:
        raise VideoError(f"ffmpeg made something else: {'; '.join(differences)}")


def _differences(info: VideoInfo, settings: VideoSettings) -> list[str]:
    expected = {
        "width": settings.width,
        "height": settings.height,
        "num_frames": settings.num_frames,
        "fps": settings.fps,
        "pix_fmt": "yuv420p",
        "color_range": "tv",
        "color_space": "bt709",
        "color_primaries": "bt709",
        "color_transfer": "bt709",
    }
    return [
        f"{name} {getattr(info, name)} instead of {value}"
        for name, value in expected.items()
        if getattr(info, name) != value
    ]


def _sync(path: Path) -> int:
    """Forces the file to the disk; its size in bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        kind = OutOfSpace if is_out_of_space(error) else VideoError
        raise kind(f"{path.name} did not reach the disk: {error}") from error
