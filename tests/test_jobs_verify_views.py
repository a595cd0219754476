"""A verification for people: the table in a terminal, and the page with its clips."""

from __future__ import annotations

import copy
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from rich.console import Console

from jobs.verification.page import MOST_SHOWN, write_page
from jobs.verification.table import show_verification

SHARES = {
    "num_clips": 600,
    "reference_frac": 0.985,
    "candidate_frac": 0.97,
    "difference_frac": -0.015,
    "low_frac": -0.0312,
    "high_frac": 0.0012,
}
CLIP = {
    "id": "caption-0001",
    "prompt": 'a red ball <rises> & "falls"',
    "seed": 7,
    "width": 64,
    "height": 96,
    "truth": ["red", "circle", "up"],
    "reference": {"file": "reference/a.mp4", "reason": None, "shows": ["red", "circle", "up"]},
    "candidate": {"file": "candidate/a.mp4", "reason": None, "shows": ["red", None, "down"]},
    "is_missing": False,
    "is_lost": True,
    "is_identical": False,
    "is_black": False,
    "is_frozen": True,
    "num_black": 0,
    "num_frozen": 14,
    "psnr_db": 24.031,
    "ssim": 0.8812,
    "vmaf": None,
    "flicker_ratio": 1.5,
}
SIDE = {
    "model": "builtin",
    "revision": "d975af94f5a8" * 4,
    "lora": None,
    "clip_s": 1.25,
    "skipped_frac": None,
}
FACTS: dict[str, Any] = {
    "verification_id": "20261201T094709Z-c8cc92",
    "verified_at": "2026-12-01T09:47:32.280059+00:00",
    "prompts": "held-out captions",
    "numerics": "exact-5",
    "gpu_name": "NVIDIA H200",
    "passed": False,
    "verdict": "failed: median PSNR",
    "folder": "verify/fast",
    "checks": [
        {"name": "median PSNR", "value": 24.03, "relation": "at least", "limit": 25.0, "unit": "dB"}
        | {"passed": False, "note": None},
        {"name": "adherence lost", "value": 0.015, "relation": "at most", "limit": 0.02, "unit": "share"}
        | {"passed": True, "note": None},
        {"name": "adherence lost (95 % bound)", "value": 0.0312, "relation": "at most", "limit": 0.04}
        | {"unit": "share", "passed": None, "note": "3 clips are too few for it: 68 would do"},
        {"name": "median SSIM", "value": 0.91, "relation": "at least", "limit": None, "unit": ""}
        | {"passed": None, "note": "few steps make another video"},
    ],
    "reference": SIDE | {"preset": "exact"},
    "candidate": SIDE | {"preset": "fast", "lora": "style", "clip_s": 0.5, "skipped_frac": 0.3125},
    "num_clips": 600,
    "num_left_out": 1,
    "num_missing": 0,
    "num_black": 0,
    "num_frozen": 1,
    "num_identical": 4,
    "psnr_db": {"median": 24.03, "least": 19.5, "most": None},
    "ssim": {"median": 0.9321, "least": 0.8, "most": 1.0},
    "vmaf": None,
    "vmaf_note": "VMAF says nothing of clips below 480p",
    "flicker_ratio": {"median": 1.02, "least": 0.5, "most": 1.5},
    "adherence": {"colour": SHARES, "all three": SHARES},
    "clips": [CLIP],
}


def facts(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(FACTS), **changes}


def table(found: dict[str, Any], *, width: int = 100) -> list[str]:
    stream = io.StringIO()
    show_verification(found, Console(file=stream, width=width), page=Path("out/verify.html"))
    return [" ".join(text.split()) for text in stream.getvalue().splitlines()]


def page(folder: Path, found: dict[str, Any]) -> str:
    write_page(found, folder / "verify.html")
    return (folder / "verify.html").read_text(encoding="utf-8")


def test_the_table_holds_every_figure_and_the_verdict() -> None:
    assert table(FACTS) == [
        "builtin with style, fast (d975af94f5a8) against builtin, exact (d975af94f5a8): "
        "600 clips of held-out captions, on NVIDIA H200",
        "shows what it should reference candidate difference, points 95 % interval",
        "colour 98.5% 97.0% -1.5 -3.1 to +0.1",
        "all three 98.5% 97.0% -1.5 -3.1 to +0.1",
        "likeness median least most",
        "PSNR 24.03 dB 19.50 dB equal",
        "SSIM 0.9321 0.8000 1.0000",
        "flicker ratio 1.020 0.500 1.500",
        "gate measured limit",
        "median PSNR 24.03 dB at least 25 dB FAILED",
        "adherence lost 1.5 points at most 2 points passed",
        "adherence lost (95 % bound) 3.1 points at most 4 points not asked",
        "median SSIM 0.91 not asked",
        "adherence lost (95 % bound) was not asked for: 3 clips are too few for it: 68 would do",
        "median SSIM was not asked for: few steps make another video",
        "4 of 600 clips are equal to the last bit",
        "1 prompt left out: the reference has no clip of them",
        "VMAF says nothing of clips below 480p",
        "forwards of the transformer that the candidate left out: 31.2%",
        "seconds of a device for a clip: 1.25 reference, 0.5 candidate",
        "failed: median PSNR",
        "the clips side by side, worst first: out/verify.html",
    ]


def test_a_verification_that_was_stopped_has_no_figures() -> None:
    assert table({"passed": False, "stopped_by": "SIGINT"}) == [
        "stopped by SIGINT: nothing is verified, the same command begins anew"
    ]


class Nesting(HTMLParser):
    """Fails where an element is closed that is not open."""

    EMPTY = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_but_its_clips(tmp_path: Path) -> None:
    text = page(tmp_path, FACTS)
    nesting = Nesting()
    nesting.feed(text)
    assert nesting.open == []
    assert re.findall(r"(?:src|href)='([^']*)'", text) == ["reference/a.mp4", "candidate/a.mp4"]
    assert not re.search(r"https?:|url\(|@import", text)
    assert "color-scheme: light dark" in text
    assert "width=device-width" in text


def test_the_page_says_what_is_wrong_in_words(tmp_path: Path) -> None:
    text = page(tmp_path, FACTS)
    assert "failed: median PSNR" in text
    assert "median SSIM was not asked for: few steps make another video" in text
    assert "14 frozen frames" in text
    assert "no longer shows what it should" in text
    assert "no shape, not circle" in text
    assert "down, not up" in text
    assert "PSNR 24.03 dB, SSIM 0.8812, flicker ratio 1.500" in text


def test_whatever_a_prompt_or_a_name_holds_is_text(tmp_path: Path) -> None:
    hostile = {**CLIP, "id": "<script>", "prompt": "</article><script>alert(1)</script>"}
    hostile["reference"] = {"file": "reference/a'b #1.mp4", "reason": None, "shows": None}
    text = page(tmp_path, facts(clips=[hostile], prompts="<b>.parquet"))
    assert "<script>alert" not in text
    assert "reference/a%27b%20%231.mp4" in text
    assert "&lt;b&gt;.parquet" in text
    assert "a red ball &lt;rises&gt; &amp; &quot;falls&quot;" in page(tmp_path, FACTS)


def test_a_clip_that_is_not_there_shows_its_reason(tmp_path: Path) -> None:
    reason = "out of <memory>"
    gone = {**CLIP, "is_missing": True, "candidate": {"file": None, "reason": reason, "shows": None}}
    text = page(tmp_path, facts(clips=[gone]))
    assert "out of &lt;memory&gt;" in text
    assert reason not in text
    assert text.count("<video") == 1
    assert "play both" not in text


def test_small_clips_lie_side_by_side_without_controls_in_their_way(tmp_path: Path) -> None:
    assert re.search(r"<video [^>]*controls", page(tmp_path, FACTS)) is None
    large = page(tmp_path, facts(clips=[{**CLIP, "width": 1280, "height": 704}]))
    assert len(re.findall(r"<video [^>]*aspect-ratio: 1280 / 704[^>]*controls", large)) == 2
    assert "<main class=small>" in page(tmp_path, FACTS)
    assert "<main class=small>" not in large


def test_of_many_clips_the_worst_are_shown_and_the_page_says_so(tmp_path: Path) -> None:
    clips = [{**CLIP, "id": f"clip-{n}"} for n in range(MOST_SHOWN + 1)]
    text = page(tmp_path, facts(clips=clips))
    assert text.count("<article>") == MOST_SHOWN
    assert "clip-0" in text
    assert f"clip-{MOST_SHOWN}," not in text
    assert f"The {MOST_SHOWN} worst of {MOST_SHOWN + 1}" in text
    assert "The worst of" not in page(tmp_path, facts(clips=clips[:-1]))
