"""The stages that time whole clips."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from pipeline.bench import ours, reference
from pipeline.bench.busy import busy_frac, kernel_intervals
from pipeline.bench.clock import Call, Clock, free_memory
from pipeline.bench.results import DIFFUSERS, OURS, TUNED, Column, StageResult
from pipeline.bench.setting import Setting
from pipeline.bench.turns import Lineup
from pipeline.bench.weights import load_parts

SMALL_CAP = 8  # 320 tokens a clip: on an H200 a forward of 8 clips takes the time of two single ones
SMALL_LATENTS = (5, 16, 16)  # frames, height, width
STEADY_CLIPS = 20
STEADY_STEPS = 3
_WARM_UP_STEPS = 2


Texts = Mapping[str, str]
ClipOf = Callable[[Setting, Texts], Call]  # the call that makes one clip of these texts at a setting


@dataclass(frozen=True, kw_only=True)
class Mp4:
    """Each call writes a file of the setting's size as that side would, of the same footage every time."""

    reference: Call
    ours: Call


def small_stage(setting: Setting) -> StageResult:
    """Clips so small that one leaves the card idle: many at once against one by one."""
    frames, height, width = SMALL_LATENTS
    spatial, temporal = setting.shape.spatial, setting.shape.temporal
    small = replace(
        setting, width=width * spatial, height=height * spatial, num_frames=(frames - 1) * temporal + 1
    )
    clock = Clock(small.device)
    parts = load_parts(small.weights, device=small.device, dtype=small.dtype)
    prompts = reference.embedded_prompts(small, parts, **ours.TEXTS)
    parts_without_text = replace(parts, text_encoder=None, tokenizer=None)
    attention, _ = reference.fastest_attention(small, clock)

    lineup = Lineup(clock, shared_bytes=clock.allocated_bytes())
    lineup.add(
        DIFFUSERS,
        lambda: reference.clip(reference.plain_pipeline(small, parts_without_text), small, **prompts),
        facts={"attention": reference.DEFAULT_ATTENTION},
    )
    small.say(f"compiling diffusers' blocks, attention {attention}")
    lineup.add(
        TUNED,
        lambda: reference.clip(
            reference.tuned_pipeline(small, parts_without_text, attention=attention), small, **prompts
        ),
        facts={"attention": attention},
    )
    small.say("warming up our engine")
    lineup.add(
        OURS,
        lambda: ours.clips(ours.make_engine(small, parts), small, num_clips=SMALL_CAP),
        units=SMALL_CAP,
        facts={"attention": ours.attention(small)},
    )
    small.say(f"timing small: turns of {small.seconds:g} s in all for each side")
    columns, _ = lineup.run(seconds=small.seconds)
    return StageResult(
        stage="small",
        timed=f"one clip, {small.label}, {small.steps} steps",
        columns=columns,
        notes=(
            f"diffusers one clip at a time; ours {SMALL_CAP} at a time, its time divided by {SMALL_CAP}",
            "in the timer: every step, decoding, frames on the host; not in it: text encoding",
        ),
        facts={"cap": SMALL_CAP},
    )


def clip_stage(setting: Setting, mp4: Mp4) -> StageResult:
    """One clip of each side, once, everything from prompt to MP4."""
    clock = Clock(setting.device)
    parts = load_parts(setting.weights, device=setting.device, dtype=setting.dtype)
    attention, _ = reference.fastest_attention(setting, clock)

    def plain() -> ClipOf:
        pipeline = reference.plain_pipeline(setting, parts)
        return lambda setting, texts: reference.clip(pipeline, setting, **texts)

    def tuned() -> ClipOf:
        setting.say(f"compiling diffusers' blocks, attention {attention}")
        pipeline = reference.tuned_pipeline(setting, parts, attention=attention)
        return lambda setting, texts: reference.clip(pipeline, setting, **texts)

    def engine() -> ClipOf:
        engine = ours.make_engine(setting, parts)
        return lambda setting, texts: ours.clips(engine, setting, texts=texts)

    return StageResult(
        stage="clip",
        timed=f"one clip from prompt to MP4, {setting.label}, {setting.steps} steps",
        columns=(
            _once(DIFFUSERS, plain, mp4.reference, setting, clock, attention=reference.DEFAULT_ATTENTION),
            # diffusers' users write their files with the same function, however well they tune the rest.
            _once(TUNED, tuned, mp4.reference, setting, clock, attention=attention),
            _once(OURS, engine, mp4.ours, setting, clock, attention=ours.attention(setting)),
        ),
        notes=(
            f"once each, one after another, after {_warm_up(setting).steps} steps of warm-up, models loaded",
            "in the timer: text encoding, every step, decoding, MP4; ours also decodes the file to check it",
            "the MP4 is of fixed natural-looking footage of the same size, not of what was decoded:",
            "random weights decode to noise, which costs an encoder many times what video does",
        ),
    )


def _once(
    name: str,
    build: Callable[[], ClipOf],
    write_mp4: Call,
    setting: Setting,
    clock: Clock,
    **facts: str,
) -> Column:
    """What `build` makes is gone afterwards, so that the next side has the device to itself."""
    setting.say(f"clip: {name}")
    free_memory(setting.device)
    clip_of = build()
    # Other texts than the timed clip's, or our engine would have those encoded already.
    clip_of(_warm_up(setting), {name: f"warm-up: {text}" for name, text in ours.TEXTS.items()})()
    clip = clip_of(setting, ours.TEXTS)
    render_ms, peak = clock.peak_of(lambda: clock.wall_ms(clip))
    mp4_ms = clock.wall_ms(write_mp4)
    return Column(
        name=name,
        samples_ms=(render_ms + mp4_ms,),
        peak_memory_bytes=peak,
        facts={"render_ms": render_ms, "mp4_ms": mp4_ms, **facts},
    )


def _warm_up(setting: Setting) -> Setting:
    return replace(setting, steps=min(_WARM_UP_STEPS, setting.steps))


def steady_stage(setting: Setting) -> StageResult:
    """Clip after clip of a few-step recipe, as in the middle of a night."""
    steady = replace(setting, steps=STEADY_STEPS)
    clock = Clock(steady.device)
    parts = load_parts(steady.weights, device=steady.device, dtype=steady.dtype)
    clip = ours.clips(ours.make_engine(steady, parts), steady, guided=False)
    steady.say("warming up our engine")
    clip()
    marks_s: list[float] = []

    def clips() -> None:
        marks_s.append(time.perf_counter())
        for _ in range(STEADY_CLIPS):
            clip()
            marks_s.append(time.perf_counter())

    steady.say(f"timing steady: {STEADY_CLIPS} clips")
    intervals, peak = clock.peak_of(lambda: kernel_intervals(clips, device=steady.device))
    return StageResult(
        stage="steady",
        timed=f"one clip of {STEADY_CLIPS} in a row, {steady.label}, {STEADY_STEPS} forwards each",
        columns=(
            Column(
                name=OURS,
                samples_ms=tuple(1e3 * (after - before) for before, after in pairwise(marks_s)),
                peak_memory_bytes=peak,
            ),
        ),
        notes=(
            "in the timer: every step, decoding, frames on the host; the prompt is encoded once",
            "GPU busy: union of kernel intervals from the first clip's first to the last clip's last kernel",
        ),
        facts={"gpu_busy_frac": busy_frac(intervals), "num_kernels": len(intervals)},
    )
