"""Runs the ffmpeg of imageio-ffmpeg as a child that cannot outlive us and cannot block on its pipes."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from threading import Thread
from typing import IO, cast

from manifests.errors import OutOfSpace, VideoError

_OTHER_FFMPEG = "reinstall imageio-ffmpeg, or set `IMAGEIO_FFMPEG_EXE` to an ffmpeg with libx264"
_ALWAYS = ("-nostdin", "-hide_banner", "-nostats")
_MAX_OUTPUT_LINES = 1_000_000  # a line for each decoded frame; hours of video fit
_MAX_MESSAGE_LINES = 200
_QUOTED_LINES = 6  # at either end: the encoder names the cause first, the rest of ffmpeg complains after

# `[h264 @ 0x55d0] [error] ...`: the level comes after the parts of ffmpeg that speak.
_POINTER = re.compile(r" @ 0x[0-9a-f]+")
_COMPLAINT = re.compile(r"(\[[^\]]+ @ 0x[0-9a-f]+\] )*\[(error|fatal|panic)\]")

# ffmpeg is started through this: it asks the kernel to kill it when the thread that started it is gone,
# then becomes ffmpeg. A preexec_fn would do the same by forking us: 10 to 50 ms with 8 GB resident, and
# unsafe beside other threads; this is 10 ms always.
_LAUNCHER = """
import os, signal, sys
if sys.platform == "linux":
    import ctypes
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A child that has ended. messages: its last stderr lines."""

    exit_code: int
    output: list[str]
    messages: list[str]


def run_ffmpeg(arguments: list[str], *, frames: Iterable[memoryview] = ()) -> Finished:
    """Runs ffmpeg to its end, writing `frames` to its stdin.

    Call it from a thread that lives until it returns: the child dies with that thread. A child that
    stops reading early is no error here; its exit code says why. Raises VideoError when it cannot start.
    """
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
    try:
        child = subprocess.Popen(
            [*launcher, _executable(), *_ALWAYS, *arguments],
            bufsize=0,  # frames go from their array to the pipe
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "AV_LOG_FORCE_NOCOLOR": "1"},
            process_group=0,  # Ctrl-C is for the parent: ffmpeg would cut the clip short
        )
    except (OSError, ValueError) as error:
        raise VideoError(f"ffmpeg could not be started: {error}") from error
    with child:
        try:
            return _supervise(child, frames)
        except BaseException:
            child.kill()
            raise


def failure(finished: Finished, *, doing: str) -> VideoError:
    """The error for a child that ended badly: its exit code and its own words."""
    lines = _quoted([_POINTER.sub("", line) for line in finished.messages if "[info]" not in line])
    text = "\n".join([f"ffmpeg failed {doing}: {_ending(finished.exit_code)}", *lines])
    out_of_space = any("No space left on device" in line or "quota exceeded" in line for line in lines)
    return OutOfSpace(text) if out_of_space else VideoError(text)


def require_encoder() -> str:
    """ffmpeg's name and version; VideoError when there is none, or one without libx264."""
    about, encoders = run_ffmpeg(["-version"]), run_ffmpeg(["-encoders"])
    if about.exit_code != 0 or not about.output:
        raise VideoError(failure(about, doing="saying its version").message, hint=_OTHER_FFMPEG)
    name = about.output[0].partition(" Copyright")[0]
    if not any("libx264" in line.split() for line in encoders.output):
        raise VideoError(f"{name}, without libx264", hint=_OTHER_FFMPEG)
    return name


def complaints(finished: Finished) -> list[str]:
    """What ffmpeg called an error, whatever its exit code."""
    return [line for line in finished.messages if _COMPLAINT.match(line)]


def _quoted(lines: list[str]) -> list[str]:
    if len(lines) <= 2 * _QUOTED_LINES:
        return lines
    return [*lines[:_QUOTED_LINES], "...", *lines[-_QUOTED_LINES:]]


def _supervise(child: subprocess.Popen[bytes], frames: Iterable[memoryview]) -> Finished:
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    output, messages = deque[str](maxlen=_MAX_OUTPUT_LINES), deque[str](maxlen=_MAX_MESSAGE_LINES)
    drains = [
        Thread(target=_drain, args=(child.stdout, output), daemon=True),
        Thread(target=_drain, args=(child.stderr, messages), daemon=True),
    ]
    for drain in drains:
        drain.start()
    _feed(child.stdin, frames)
    exit_code = child.wait()
    for drain in drains:
        drain.join()
    return Finished(exit_code=exit_code, output=list(output), messages=list(messages))


def _feed(stdin: IO[bytes], frames: Iterable[memoryview]) -> None:
    try:
        for frame in frames:
            written = 0
            while written < len(frame):
                written += stdin.write(frame[written:])
        stdin.close()
    except BrokenPipeError:
        pass


def _drain(stream: IO[bytes], lines: deque[str]) -> None:
    with io.BufferedReader(cast(io.RawIOBase, stream)) as buffered:
        lines.extend(line.decode(errors="replace").rstrip("\r\n") for line in buffered)


def _ending(exit_code: int) -> str:
    return f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


@cache
def _executable() -> str:
    import imageio_ffmpeg  # finding the binary runs it once: not at import

    try:
        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError as error:
        raise VideoError(
            f"no ffmpeg: {error}", hint="reinstall imageio-ffmpeg, or set `IMAGEIO_FFMPEG_EXE` to an ffmpeg"
        ) from error
