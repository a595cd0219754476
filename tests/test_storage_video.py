"""A clip is exactly what was asked for, or it is an error that says why and leaves nothing."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import numpy.typing as npt
import pytest

from manifests.errors import OutOfSpace, VideoError
from storage.paths import clip_name, partial_name
from storage.video import encode_clip, is_complete, probe, read_metadata
from tests.storage_video import METADATA, noise, video_settings, write_clip

REPOSITORY = Path(__file__).parent.parent


def decode(path: Path, *, pix_fmt: str) -> npt.NDArray[np.uint8]:
    """The bytes of all frames; rgb24 is what a player shows, converted as the tags of the file say."""
    command = f"-loglevel error -i {path} -f rawvideo -pix_fmt {pix_fmt} -sws_flags accurate_rnd pipe:1"
    process = [imageio_ffmpeg.get_ffmpeg_exe(), *command.split()]
    return np.frombuffer(subprocess.run(process, capture_output=True, check=True).stdout, np.uint8)


def red(*, width: int, height: int, num_frames: int = 2) -> npt.NDArray[np.uint8]:
    """Pure red as BT.709 limited I420: Y 63, Cb 102, Cr 240."""
    area = width * height
    planes = np.repeat(np.array([63, 102, 240], np.uint8), [area, area // 4, area // 4])
    return np.broadcast_to(
        planes.reshape(height * 3 // 2, width), (num_frames, height * 3 // 2, width)
    ).copy()


@pytest.mark.parametrize(
    ("width", "height", "num_frames", "fps"),
    [
        (2, 2, 1, Fraction(240)),
        (64, 64, 1, Fraction(24000, 1001)),
        (64, 64, 17, Fraction(24000, 1001)),
        (130, 250, 16, Fraction(24)),
        (64, 48, 3, Fraction(1)),
        (64, 48, 4, Fraction(241, 10)),
        (64, 48, 4, Fraction(123457, 10000)),
        (48, 64, 9, Fraction(240)),
        (1280, 720, 2, Fraction(30000, 1001)),
    ],
)
def test_size_rate_and_frame_count_are_exact(
    width: int, height: int, num_frames: int, fps: Fraction, tmp_path: Path
) -> None:
    path = tmp_path / "clip"
    settings = video_settings(width=width, height=height, num_frames=num_frames, fps=fps)
    encoded = encode_clip(noise(settings), settings=settings, metadata=METADATA, partial=path)
    info = probe(path)
    assert (info.width, info.height, info.num_frames, info.fps) == (width, height, num_frames, fps)
    assert info.metadata == METADATA
    assert encoded.num_bytes == path.stat().st_size
    assert encoded.write_s > 0
    assert is_complete(path, settings=settings)


@pytest.mark.parametrize("crf", [1, 18, 51])
def test_every_clip_opens_everywhere(crf: int, tmp_path: Path) -> None:
    path = tmp_path / "clip"
    write_clip(path, crf=crf, encoder_preset="medium")
    info = probe(path)
    assert (info.codec, info.pix_fmt, info.color_range) == ("h264", "yuv420p", "tv")
    assert (info.color_space, info.color_primaries, info.color_transfer) == ("bt709", "bt709", "bt709")
    assert info.profile in {"Constrained Baseline", "Baseline", "Main", "High"}
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat"), "a player can start before it has it all"


@pytest.mark.parametrize(("width", "height"), [(64, 64), (1280, 720)])
def test_pure_red_stays_pure_red(width: int, height: int, tmp_path: Path) -> None:
    path = tmp_path / "clip"
    settings = video_settings(width=width, height=height, num_frames=2, encoder_preset="medium")
    encode_clip(red(width=width, height=height), settings=settings, metadata=METADATA, partial=path)
    shown = decode(path, pix_fmt="rgb24").reshape(2, height, width, 3).astype(int)
    assert np.abs(shown - [255, 0, 0]).max() <= 3


def test_frames_keep_their_order_and_pixels(tmp_path: Path) -> None:
    path = tmp_path / "clip"
    settings = video_settings(num_frames=8, crf=1)
    levels = np.array([40, 200, 60, 180, 80, 160, 100, 140], np.uint8)
    frames = np.repeat(levels, 96 * 64).reshape(8, 96, 64)
    encode_clip(frames, settings=settings, metadata=METADATA, partial=path)
    written = decode(path, pix_fmt="yuv420p").reshape(frames.shape)
    assert np.abs(written.astype(int) - frames).max() <= 1


def test_the_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        write_clip(path, width=320, height=192, num_frames=24, encoder_preset="medium")
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_view_that_is_not_contiguous_is_encoded_as_it_reads(tmp_path: Path) -> None:
    settings = video_settings()
    wide = noise(replace(settings, width=128))
    encode_clip(wide[:, :, 32:96], settings=settings, metadata=METADATA, partial=tmp_path / "view")
    encode_clip(wide[:, :, 32:96].copy(), settings=settings, metadata=METADATA, partial=tmp_path / "copy")
    assert (tmp_path / "view").read_bytes() == (tmp_path / "copy").read_bytes()


@pytest.mark.parametrize("name", ["a:b.mp4", "-rf", "p%04d", "with space", "字", "quote'\"", "a\nb", "a=b;c"])
def test_no_name_means_anything_to_ffmpeg(name: str, tmp_path: Path) -> None:
    write_clip(tmp_path / name)
    assert os.listdir(tmp_path) == [name]


STRANGE_IDS = ["", "a\nb", "a=b;#c", "\\ \"'", "\0", "\x1b[0m", "字" * 2000, "🎬", "\ud800", "comment=x"]
SPEAKING_LIKE_FFMPEG = ["Stream #0:0: Video: h264, yuv444p, 2x2", "[error] no", "[mp4 @ 0x1] [error] no"]


@pytest.mark.parametrize("id", STRANGE_IDS + SPEAKING_LIKE_FFMPEG)
def test_metadata_survives_whatever_the_id(id: str, tmp_path: Path) -> None:
    metadata = replace(METADATA, id=id, model="hub/модель@rev")
    write_clip(tmp_path / "clip", metadata=metadata)
    assert read_metadata(tmp_path / "clip") == metadata


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((4, 96, 64), np.uint8),
        np.zeros((5, 64, 64), np.uint8),
        np.zeros((5, 96, 64), np.float32),
        np.zeros((5 * 96, 64), np.uint8),
    ],
    ids=["too few", "no chroma", "floats", "flat"],
)
def test_frames_that_are_not_as_asked_are_refused(frames: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    with pytest.raises(VideoError, match=r"frames must be uint8 \(5, 96, 64\)"):
        encode_clip(frames, settings=video_settings(), metadata=METADATA, partial=tmp_path / "clip")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 63}, "even size: 63x64"),
        ({"num_frames": 0}, "at least one frame: 0"),
        ({"fps": Fraction(2_000_003, 1_000_001)}, "round the rate: 2000003/1000001"),
        ({"codec": "nope"}, r"exit code \d+\n(?s:.*)Unknown encoder 'nope'"),
        ({"encoder_preset": "nope"}, r"exit code \d+\n(?s:.*)invalid preset 'nope'"),
        ({"crf": 0}, r"exit code \d+\n(?s:.*)high profile doesn't support lossless"),
    ],
)
def test_settings_that_cannot_be_say_why(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(VideoError, match=message):
        write_clip(tmp_path / "clip", **changes)
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_told_in_ffmpegs_words(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match=r"exit code \d+\n(?s:.*)No such file or directory"):
        write_clip(tmp_path / "gone" / "clip")


def test_a_folder_removed_during_encoding_is_told_in_ffmpegs_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    settings = video_settings(width=640, height=360, num_frames=12)

    def frames_then_no_folder(frames: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
        yield frames[:6].data.cast("B")
        # ffmpeg has the file open by now: it reads ahead no more than a pipe holds.
        shutil.rmtree(folder)
        yield frames[6:].data.cast("B")

    monkeypatch.setattr("storage.video._planes", frames_then_no_folder)
    with pytest.raises(VideoError, match=r"exit code \d+\n(?s:.*)No such file or directory"):
        encode_clip(noise(settings), settings=settings, metadata=METADATA, partial=folder / "clip")
    assert not folder.exists()


def test_a_full_disk_is_out_of_space(tmp_path: Path) -> None:
    partial = tmp_path / "clip"
    partial.symlink_to("/dev/full")
    with pytest.raises(OutOfSpace, match="No space left on device"):
        write_clip(partial)
    assert os.listdir(tmp_path) == []


def test_a_file_that_does_not_reach_the_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("storage.video.os.fsync", full)
    with pytest.raises(OutOfSpace, match="clip did not reach the disk"):
        write_clip(tmp_path / "clip")
    assert os.listdir(tmp_path) == []


def test_a_clip_that_lost_frames_on_the_way_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.video._planes", lambda frames: [frames[:3].data.cast("B")])
    with pytest.raises(VideoError, match="num_frames 3 instead of 5"):
        write_clip(tmp_path / "clip")
    assert os.listdir(tmp_path) == []


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every child started from now on, in order."""
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr("storage.ffmpeg.subprocess.Popen", Recorded)
    return started


def test_an_encoder_killed_midway_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    """As by the kernel when memory runs out; the writer must neither hang nor see a broken pipe alone."""

    def frames_then_kill(frames: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
        yield frames[:3].data.cast("B")
        children[-1].kill()
        yield np.zeros(10_000_000, np.uint8).data

    monkeypatch.setattr("storage.video._planes", frames_then_kill)
    with pytest.raises(VideoError, match="killed by signal 9"):
        write_clip(tmp_path / "clip")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kept", [0.5, 0.95, 0.999])
def test_a_truncated_clip_is_not_complete(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "clip"
    write_clip(path, num_frames=17)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    assert read_metadata(path) == METADATA, "its head still says whose it is"
    assert not is_complete(path, settings=video_settings(num_frames=17))
    with pytest.raises(VideoError):
        probe(path)


def test_a_damaged_frame_is_not_complete(tmp_path: Path) -> None:
    path = tmp_path / "clip"
    write_clip(path, num_frames=17)
    content = bytearray(path.read_bytes())
    content[-2000:-1500] = bytes(500)
    path.write_bytes(content)
    assert not is_complete(path, settings=video_settings(num_frames=17))


@pytest.mark.parametrize(
    "other", [{"num_frames": 4}, {"width": 32}, {"height": 32}, {"fps": Fraction(24000, 1001)}]
)
def test_a_clip_of_other_settings_is_not_complete(other: dict[str, object], tmp_path: Path) -> None:
    write_clip(tmp_path / "clip")
    assert not is_complete(tmp_path / "clip", settings=video_settings(**other))


def test_a_clip_without_tags_is_told_from_ours(tmp_path: Path) -> None:
    """Made by another program: full range, 4:4:4, no tags, 12 frames at 12.5 a second, no metadata."""
    path = tmp_path / "other.mp4"
    source = "testsrc=size=48x32:rate=25/2:duration=0.96"
    command = f"-loglevel error -f lavfi -i {source} -pix_fmt yuv444p -color_range pc".split()
    subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), *command, str(path)], check=True)
    info = probe(path)
    assert (info.width, info.height, info.num_frames, info.fps) == (48, 32, 12, Fraction(25, 2))
    assert (info.pix_fmt, info.profile, info.metadata) == ("yuvj444p", "High 4:4:4 Predictive", None)
    assert (info.color_space, info.color_primaries, info.color_transfer) == ("unknown",) * 3
    assert not is_complete(path, settings=video_settings(width=48, height=32, num_frames=12))


@pytest.mark.parametrize("content", [b"", b"not a video", b"\0\0\0\x10moov" + b"\0" * 8, b"\0" * 4096])
def test_what_is_no_video_has_no_metadata(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(content)
    assert read_metadata(path) is None
    assert not is_complete(path, settings=video_settings())
    with pytest.raises(VideoError, match=r"exit code \d+\n"):
        probe(path)


def test_colour_asked_of_ffmpeg_does_not_blind_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AV_LOG_FORCE_COLOR", "1")
    write_clip(tmp_path / "clip")
    with pytest.raises(VideoError, match="Unknown encoder 'nope'") as caught:
        write_clip(tmp_path / "other", codec="nope")
    assert "\x1b" not in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match=r"no such video file: .*gone\.mp4"):
        probe(tmp_path / "gone.mp4")


# Stops forever with ffmpeg in the middle of a clip, having said which process that is.
PARENT = """
import subprocess, sys, threading
from pathlib import Path
import storage.video
from tests.storage_video import write_clip

children = []

class Recorded(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        children.append(self.pid)

def frames_then_forever(frames):
    for _ in range(30):
        yield frames[:1].data.cast("B")
    print(children[-1], flush=True)
    threading.Event().wait()

subprocess.Popen = Recorded
storage.video._planes = frames_then_forever
write_clip(Path(sys.argv[1]), width=640, height=360, num_frames=90)
"""


def test_a_killed_parent_leaves_a_partial_and_no_ffmpeg(tmp_path: Path) -> None:
    partial = tmp_path / partial_name(clip_name("a", "f" * 64), run_id="r1")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(partial)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            encoder = int(parent.stdout.readline())
            assert "libx264" in Path(f"/proc/{encoder}/cmdline").read_text()
            descriptor = os.pidfd_open(encoder)
        finally:
            parent.kill()
    with os.fdopen(descriptor, "rb") as ended:
        assert select.select([ended], [], [], 10)[0], "ffmpeg outlived its parent"
    assert set(os.listdir(tmp_path)) <= {partial.name}


def test_ctrl_c_at_the_terminal_does_not_reach_ffmpeg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    groups: list[int] = []

    def frames_and_group(frames: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
        groups.append(os.getpgid(children[-1].pid))
        yield frames.data.cast("B")

    monkeypatch.setattr("storage.video._planes", frames_and_group)
    write_clip(tmp_path / "clip")
    assert groups != [os.getpgrp()]
