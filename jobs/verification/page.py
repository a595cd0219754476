"""One page with pairs of clips side by side, the worst first. It needs no network: the clips lie by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jobs.verification.pairs import ASPECTS
from jobs.verification.table import (
    ADHERENCE,
    GATE,
    LIKENESS,
    SPREAD,
    adherence_cells,
    check_cells,
    figure,
    headline,
    likeness_cells,
    notes,
)

# A phone that has to load more videos than this gives up; all figures are in verify.json.
MOST_SHOWN = 60
_SMALL_PIXELS = 320  # of width: several pairs side by side show as much

_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d8d8d8, #3c3c3c); --soft: light-dark(#5c5c5c, #a6a6a6);
  --bad: light-dark(#b3261e, #ff8a80); --good: light-dark(#1e6b32, #7fd99a);
  --card: light-dark(#fff, #1d1d1f); }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: light-dark(#f6f6f4, #121214);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; margin: .3rem 0; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .5rem; }
.passed { color: var(--good); } .failed { color: var(--bad); } .soft { color: var(--soft); font-size: .9rem; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: normal;
  min-width: 7rem; }
main { display: grid; gap: .8rem; }
main.small { grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); }
article { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; }
article p { margin: .2rem 0; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .6rem; margin-top: .6rem; }
figure { margin: 0; } video { width: 100%; display: block; background: #000; border-radius: .25rem; }
.none { display: grid; place-items: center; border: 1px dashed var(--line); padding: .5rem; }
button { font: inherit; padding: .3rem .8rem; margin-top: .6rem; }
"""

# Both clips of a pair from their first frame, so that the same moments are seen together.
_SCRIPT = """
for (const button of document.querySelectorAll("button")) {
  const videos = button.closest("article").querySelectorAll("video");
  button.addEventListener("click", () => {
    for (const video of videos) { video.currentTime = 0; video.play(); }
  });
}
"""


def write_page(facts: Mapping[str, Any], path: Path) -> None:
    """facts: of a Verification that came to a verdict. Raises OSError."""
    path.write_text("".join(_page(facts)), encoding="utf-8")


def _page(facts: Mapping[str, Any]) -> Iterator[str]:
    state = "passed" if facts["passed"] else "failed"
    yield "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
    yield "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    yield f"<title>{state}: vgbatch verify</title><style>{_STYLE}</style></head><body>\n"
    yield f"<h1><span class='{state}'>{escape(facts['verdict'])}</span></h1>"
    yield f"<p>{escape(headline(facts))}</p>"
    day, _, instant = facts["verified_at"].partition("T")
    yield f"<p class='soft'>{escape(facts['gpu_name'])}, {day} {instant[:5]} UTC, "
    yield f"numerics {escape(facts['numerics'])}, {escape(facts['verification_id'])}</p>\n"
    yield _table(GATE, [check_cells(check) for check in facts["checks"]])
    if facts["adherence"]:
        yield _table(ADHERENCE, adherence_cells(facts))
    if likeness := likeness_cells(facts):
        yield _table(SPREAD, likeness)
    yield from (f"<p class='soft'>{escape(note)}</p>" for note in notes(facts))
    yield f"\n<h2>Clips, worst first</h2>{_how_many(facts)}\n"
    clips = facts["clips"][:MOST_SHOWN]
    is_small = all(clip["width"] <= _SMALL_PIXELS for clip in clips)
    yield f"<main{' class=small' if is_small else ''}>\n"
    # Their controls would cover half of a small clip; one button plays both.
    controls = "" if is_small else "controls"
    yield from (_clip(clip, controls) for clip in clips)
    yield f"</main><script>{_SCRIPT}</script></body></html>\n"


def _how_many(facts: Mapping[str, Any]) -> str:
    num_clips = len(facts["clips"])
    if num_clips <= MOST_SHOWN:
        return ""
    return f"<p class='soft'>The {MOST_SHOWN} worst of {num_clips}; the others are in verify.json.</p>"


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>\n"


def _clip(clip: Mapping[str, Any], controls: str) -> str:
    faults = "".join(f" <b class='failed'>{fault}</b>" for fault in _faults(clip))
    sides = "".join(_side(name, clip, controls) for name in ("reference", "candidate"))
    label = "play both" if all(clip[name]["file"] for name in ("reference", "candidate")) else "play"
    button = f"<button type='button'>{label}</button>" if "<video" in sides else ""
    return (
        f"<article><p>{escape(clip['prompt'])}</p><p class='soft'>{escape(clip['id'])}, seed {clip['seed']}"
        f"{_figures(clip)}{faults}</p><div class='pair'>{sides}</div>{button}</article>\n"
    )


def _faults(clip: Mapping[str, Any]) -> Iterator[str]:
    if clip["is_missing"]:
        yield "no clip"
    if clip["is_black"]:
        yield f"{clip['num_black']} black frames"
    if clip["is_frozen"]:
        yield f"{clip['num_frozen']} frozen frames"
    if clip["is_lost"]:
        yield "no longer shows what it should"


def _figures(clip: Mapping[str, Any]) -> str:
    if clip["is_identical"]:
        return ", equal to the last bit"
    known = [(*shown, clip[name]) for name, shown in LIKENESS.items() if clip[name] is not None]
    return "".join(
        f", {escape(label)} {escape(figure(value, unit, digits))}" for label, unit, digits, value in known
    )


def _side(name: str, clip: Mapping[str, Any], controls: str) -> str:
    side = clip[name]
    # Before a video is loaded nothing else says how tall it is.
    shape = f"style='aspect-ratio: {clip['width']} / {clip['height']}'"
    if side["file"] is None:
        shown = f"<div class='none' {shape}>{escape(side['reason'] or 'no clip')}</div>"
    else:
        source = escape(quote(side["file"]))
        shown = f"<video src='{source}' {shape} {controls} muted loop playsinline preload='metadata'></video>"
    return (
        f"<figure><figcaption class='soft'>{name}{_reading(side, clip['truth'])}</figcaption>{shown}</figure>"
    )


def _reading(side: Mapping[str, Any], truth: list[str] | None) -> str:
    """What the oracle sees in it, what is wrong marked by a word as well as by colour."""
    if truth is None or side["shows"] is None:
        return ""
    words = []
    for aspect, seen, wanted in zip(ASPECTS, side["shows"], truth, strict=True):
        said = escape(seen or f"no {aspect}")
        words.append(said if seen == wanted else f"<b class='failed'>{said}, not {escape(wanted)}</b>")
    return f": {', '.join(words)}"
