"""The stages that time what changes the numbers: presets `turbo` and `fast`.

What random weights make means nothing here, and which steps a cache leaves out is decided by data: `fast` is
timed at given shares of skipped steps, and `verify` says which share a checkpoint really skips.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter
from typing import Any

from manifests.presets import FAST, TURBO
from pipeline.approx.presets import Approximation, approximation_of
from pipeline.bench import ours, reference
from pipeline.bench.clips import STEADY_CLIPS, Mp4, Texts
from pipeline.bench.clock import Clock, free_memory
from pipeline.bench.results import DIFFUSERS, Column, StageResult
from pipeline.bench.setting import Setting
from pipeline.bench.weights import Parts, load_parts
from pipeline.engine import Engine
from pipeline.rendering import Rendering

TURBO_STEPS = 3
SKIPPED_FRACS = (0.0, 0.25, 0.5, 0.6)
HEADLINE_FRAC = 0.5
FAST_CLIPS = 2
_FEW, _MORE = 1, 4  # steps that the reference is timed with, to be scaled from


def turbo_stage(setting: Setting, mp4: Mp4) -> StageResult:
    """Clip after clip of a few-step checkpoint, prompt to MP4, as in the middle of a night."""
    clock = Clock(setting.device)
    parts = load_parts(setting.weights, device=setting.device, dtype=setting.dtype)
    plain = _reference(setting, parts, mp4, clock)
    turbo = replace(setting, steps=TURBO_STEPS)
    engine = ours.make_engine(turbo, parts, approximation=approximation_of(TURBO))
    setting.say("warming up our engine")
    ours.clips(engine, turbo, guided=False)()
    setting.say(f"timing turbo: {STEADY_CLIPS} clips")
    texts = [{**ours.TEXTS, "prompt": f"{number}: {ours.TEXTS['prompt']}"} for number in range(STEADY_CLIPS)]
    return StageResult(
        stage="turbo",
        timed=f"one clip of {STEADY_CLIPS} in a row, prompt to MP4, {setting.label}, {TURBO_STEPS} forwards",
        columns=(plain, _in_a_row("ours turbo", engine, turbo, texts, mp4, clock, guided=False)),
        notes=_notes(setting),
    )


def fast_stage(setting: Setting, mp4: Mp4) -> StageResult:
    """Guided clips, prompt to MP4, at several shares of skipped steps."""
    clock = Clock(setting.device)
    parts = load_parts(setting.weights, device=setting.device, dtype=setting.dtype)
    plain = _reference(setting, parts, mp4, clock)
    return StageResult(
        stage="fast",
        timed=f"one clip of {FAST_CLIPS} in a row, prompt to MP4, {setting.label}, {setting.steps} steps",
        columns=(plain, *_fast_columns(setting, parts, mp4, clock)),
        notes=(
            *_notes(setting),
            f"the headline is the column of {HEADLINE_FRAC:.0%} skipped, a share that is assumed:",
            "`vgbatch verify --preset fast` says which share a checkpoint skips",
        ),
        facts={"headline_frac": HEADLINE_FRAC},
    )


def _fast_columns(setting: Setting, parts: Parts, mp4: Mp4, clock: Clock) -> Iterator[Column]:
    engine = ours.make_engine(setting, parts, approximation=_at_share(0.0))
    setting.say("warming up our engine")
    ours.clips(engine, replace(setting, steps=min(_MORE, setting.steps)))()
    for skipped_frac in SKIPPED_FRACS:
        setting.say(f"timing fast: {skipped_frac:.0%} of the steps skipped, {FAST_CLIPS} clips")
        engine.approximation = _at_share(skipped_frac)
        # Texts of their own, or they would be encoded already.
        texts = [
            {name: f"{skipped_frac:.0%}, {number}: {text}" for name, text in ours.TEXTS.items()}
            for number in range(FAST_CLIPS)
        ]
        yield _in_a_row(f"ours {skipped_frac:.0%}", engine, setting, texts, mp4, clock, guided=True)


def _in_a_row(
    name: str,
    engine: Engine,
    setting: Setting,
    texts: Sequence[Texts],
    mp4: Mp4,
    clock: Clock,
    *,
    guided: bool,
) -> Column:
    """Clips one after another, files written meanwhile: a file's time after the one before it.

    What begins and ends a row is in it once for all of its clips, so only its share of their encoding counts.
    """
    renderings: list[Rendering] = []
    written_at: list[float] = []

    def write() -> None:
        mp4.ours()
        written_at.append(perf_counter())

    def row() -> float:
        started_at = perf_counter()
        used = ["prompt", "negative_prompt"] if guided else ["prompt"]
        ours.encode(engine, setting, [each[name] for each in texts for name in used])
        clock.synchronize()
        encoded_at = perf_counter()
        with ThreadPoolExecutor(1) as writer:
            writing: Future[None] | None = None
            for each in texts:
                renderings.append(ours.clips(engine, setting, guided=guided, texts=each)())
                if writing is not None:
                    writing.result()  # no more than one clip waits for the encoder, as in a run
                writing = writer.submit(write)
        return encoded_at - started_at

    encode_s, peak = clock.peak_of(row)
    between_s = (written_at[-1] - written_at[0]) / (len(texts) - 1)
    facts: dict[str, Any] = {
        "encode_ms": 1e3 * encode_s / len(texts),
        "steps_computed": renderings[-1].steps_computed,
        "steps_skipped": renderings[-1].steps_skipped,
    }
    clip_ms = 1e3 * between_s + facts["encode_ms"]
    return Column(name=name, samples_ms=(clip_ms,), peak_memory_bytes=peak, facts=facts)


def _at_share(skipped_frac: float) -> Approximation:
    """`fast`, but for who decides about steps."""
    return replace(approximation_of(FAST), step_cache_limit=None, skipped_frac=skipped_frac)


def _reference(setting: Setting, parts: Parts, mp4: Mp4, clock: Clock) -> Column:
    """diffusers as documented, with all steps of a guided clip: timed with a few of them, and scaled."""
    setting.say("timing diffusers, to be scaled")
    free_memory(setting.device)
    pipeline = reference.plain_pipeline(setting, parts)
    few, more = (
        reference.clip(pipeline, replace(setting, steps=steps), **ours.TEXTS) for steps in (_FEW, _MORE)
    )
    few()  # what is chosen or allocated the first time
    few_ms, more_ms, mp4_ms = clock.wall_ms(few), clock.wall_ms(more), clock.wall_ms(mp4.reference)
    step_ms = (more_ms - few_ms) / (_MORE - _FEW)
    total_ms = more_ms + (setting.steps - _MORE) * step_ms + mp4_ms
    return Column(
        name=DIFFUSERS,
        samples_ms=(total_ms,),
        peak_memory_bytes=None,
        facts={"render_ms": total_ms - mp4_ms, "mp4_ms": mp4_ms, "attention": reference.DEFAULT_ATTENTION},
    )


def _notes(setting: Setting) -> tuple[str, ...]:
    return (
        f"diffusers: {setting.steps} guided steps, scaled from clips of {_FEW} and {_MORE}",
        "in the timer: text encoding, every step, decoding, MP4; ours also decodes the file to check it",
        "ours: from one finished file to the next, and a clip's share of encoding the texts of all at once",
        "the MP4 is of fixed natural-looking footage of the same size, not of what was decoded",
    )
