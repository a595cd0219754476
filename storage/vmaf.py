"""VMAF of one clip against another by ffmpeg's libvmaf, over frames as they were before encoding."""

from __future__ import annotations

import re
from pathlib import Path

from storage.ffmpeg import failure, run_ffmpeg

# Its model was trained on pictures seen full-screen: of smaller ones its number says nothing.
LEAST_SIDE = 480
_THREADS = 4
_SCORE = re.compile(r"VMAF score: (\d+(?:\.\d+)?)")


def has_vmaf() -> bool:
    """Whether this ffmpeg has the filter: builds differ. Raises VideoError when there is no ffmpeg."""
    filters = run_ffmpeg(["-filters"])
    return any("libvmaf" in line.split() for line in filters.output)


def vmaf(candidate: Path, *, reference: Path, width: int, height: int) -> float:
    """From 0 to 100, which is as good as the reference: the mean over frames of Netflix's model vmaf_v0.6.1.

    candidate, reference: files of bare I420 frames, as many in each. width, height: at least LEAST_SIDE.
    Raises VideoError.
    """
    size = f"{width}x{height}"
    # VMAF compares frame by frame and knows no time: any rate will do.
    source = f"-f rawvideo -pix_fmt yuv420p -video_size {size} -r 24 -i"
    finished = run_ffmpeg(
        [
            *("-loglevel", "level+info"),
            *source.split(),
            f"file:{candidate}",
            *source.split(),
            f"file:{reference}",
            *f"-lavfi [0:v][1:v]libvmaf=n_threads={_THREADS} -f null -".split(),
        ]
    )
    scores = [float(found[1]) for line in finished.messages if (found := _SCORE.search(line))]
    if finished.exit_code != 0 or not scores:
        raise failure(finished, doing="comparing clips with libvmaf")
    return scores[-1]
