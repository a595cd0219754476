"""The stages that time what changes the numbers: presets `turbo` and `fast`.

What random weights make means nothing here, and which steps a cache leaves out is decided by data: `fast` is
timed at given shares of skipped steps, and `verify` says which share a checkpoint really skips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from manifests.presets import FAST, TURBO
from pipeline.approx.presets import Approximation, approximation_of
from pipeline.bench import ours, reference
from pipeline.bench.clips import STEADY_CLIPS, Mp4
from pipeline.bench.clock import Clock, free_memory
from pipeline.bench.results import DIFFUSERS, Column, StageResult
from pipeline.bench.setting import Setting
from pipeline.bench.weights import Parts, load_parts
from pipeline.rendering import Rendering

TURBO_STEPS = 3
SKIPPED_FRACS = (0.0, 0.25, 0.5, 0.6)
HEADLINE_FRAC = 0.5
_FEW, _MORE = 1, 4  # steps that the reference is timed with, to be scaled from


def turbo_stage(setting: Setting, mp4: Mp4) -> StageResult:
    """Clip after clip of a few-step checkpoint, prompt to MP4, as in the middle of a night."""
    clock = Clock(setting.device)
    parts = load_parts(setting.weights, device=setting.device, dtype=setting.dtype)
    plain = _reference(setting, parts, mp4, clock)
    turbo = replace(setting, steps=TURBO_STEPS)
    engine = ours.make_engine(turbo, parts, approximation=approximation_of(TURBO))
    texts = [{**ours.TEXTS, "prompt": f"{number}: {ours.TEXTS['prompt']}"} for number in range(STEADY_CLIPS)]
    setting.say("warming up our engine")
    ours.clips(engine, turbo, guided=False)()

    def night() -> None:
        ours.encode(engine, turbo, [text["prompt"] for text in texts])
        with ThreadPoolExecutor(1) as writer:
            written: Future[object] | None = None
            for text in texts:
                ours.clips(engine, turbo, guided=False, texts=text)()
                if written is not None:
                    written.result()  # no more than one clip waits for the encoder, as in a run
                written = writer.submit(mp4.ours)

    setting.say(f"timing turbo: {STEADY_CLIPS} clips")
    night_ms, peak = clock.peak_of(lambda: clock.wall_ms(night))
    return StageResult(
        stage="turbo",
        timed=f"one clip of {STEADY_CLIPS} in a row, prompt to MP4, {setting.label}, {TURBO_STEPS} forwards",
        columns=(
            plain,
            Column(name="ours turbo", samples_ms=(night_ms / STEADY_CLIPS,), peak_memory_bytes=peak),
        ),
        notes=(
            *_notes(setting),
            f"ours: {STEADY_CLIPS} clips, from the first prompt's encoding to the last file, divided",
        ),
    )


def fast_stage(setting: Setting, mp4: Mp4) -> StageResult:
    """One guided clip, prompt to MP4, at several shares of skipped steps."""
    clock = Clock(setting.device)
    parts = load_parts(setting.weights, device=setting.device, dtype=setting.dtype)
    plain = _reference(setting, parts, mp4, clock)
    return StageResult(
        stage="fast",
        timed=f"one clip from prompt to MP4, {setting.label}, {setting.steps} steps",
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
        setting.say(f"timing fast: {skipped_frac:.0%} of the steps skipped")
        engine.approximation = _at_share(skipped_frac)
        # Texts of their own, or they would be encoded already.
        texts = {name: f"{skipped_frac:.0%} {text}" for name, text in ours.TEXTS.items()}
        yield _fast_column(f"ours {skipped_frac:.0%}", ours.clips(engine, setting, texts=texts), mp4, clock)


def _fast_column(name: str, clip: Callable[[], Rendering], mp4: Mp4, clock: Clock) -> Column:
    renderings: list[Rendering] = []
    render_ms, peak = clock.peak_of(lambda: clock.wall_ms(lambda: renderings.append(clip())))
    mp4_ms = clock.wall_ms(mp4.ours)
    (rendering,) = renderings
    return Column(
        name=name,
        samples_ms=(render_ms + mp4_ms,),
        peak_memory_bytes=peak,
        facts={
            "render_ms": render_ms,
            "mp4_ms": mp4_ms,
            "steps_computed": rendering.steps_computed,
            "steps_skipped": rendering.steps_skipped,
        },
    )


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
        "the MP4 is of fixed natural-looking footage of the same size, not of what was decoded",
    )
