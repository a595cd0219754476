"""The columns of a manifest: their rules in words, and which of a file's columns is which."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass

import pyarrow as pa

from manifests.errors import ManifestError, MissingColumn, UnknownColumn


@dataclass(frozen=True, kw_only=True)
class ColumnRule:
    """One known column. kind: how it is read, see manifests.columns. pixel: whether it decides the
    picture, so that it is hashed into the id of a row that has none."""

    name: str
    kind: str
    type: str
    default: str
    about: str
    pixel: bool = True


RULES = {
    rule.name: rule
    for rule in (
        ColumnRule(
            name="prompt",
            kind="text",
            type="string",
            default="required",
            about="What the clip shows. Words past the text encoder's limit are cut, with a warning.",
        ),
        ColumnRule(
            name="id",
            kind="id",
            type="string",
            default="`h-` and a hash of the row",
            about="Your name for the clip, unique in the manifest. A changed row of the same id is rendered "
            "again.",
            pixel=False,
        ),
        ColumnRule(
            name="negative_prompt",
            kind="text",
            type="string",
            default="the model's",
            about="What the clip should not show. An empty string means none at all.",
        ),
        ColumnRule(
            name="width",
            kind="whole",
            type="int",
            default="the model's",
            about="Pixels, even. Delivered exactly; rendered at the next size the model can do and cropped.",
        ),
        ColumnRule(
            name="height", kind="whole", type="int", default="the model's", about="Pixels, even; as width."
        ),
        ColumnRule(
            name="resolution",
            kind="text",
            type="string",
            default="-",
            about="Instead of width and height: `1344x768`, or a name from the model's table (`480p`).",
        ),
        ColumnRule(
            name="num_frames",
            kind="whole",
            type="int",
            default="the model's",
            about="Frames delivered. The model's next valid count is rendered and the tail trimmed.",
        ),
        ColumnRule(
            name="duration",
            kind="duration",
            type="seconds",
            default="-",
            about="Instead of num_frames: seconds, as a number or a duration. Times fps, half rounded up.",
        ),
        ColumnRule(
            name="fps",
            kind="rate",
            type="number or `24000/1001`",
            default="the model's",
            about="1 to 240; 23.976 means 24000/1001. Sets the speed of playing, never resamples.",
        ),
        ColumnRule(
            name="seed",
            kind="whole",
            type="int64",
            default="from the id",
            about="0 to 9223372036854775807. The same seed gives the same clip.",
        ),
        ColumnRule(
            name="steps", kind="whole", type="int", default="the model's", about="Denoising steps, 1 to 1000."
        ),
        ColumnRule(
            name="guidance_scale",
            kind="real",
            type="float",
            default="the model's",
            about="Classifier-free guidance, 0 to 100; 1 turns it off and halves the time.",
        ),
        ColumnRule(
            name="guidance_scale_2",
            kind="real",
            type="float",
            default="the model's",
            about="Guidance of the low-noise expert, for models that have two.",
        ),
        ColumnRule(
            name="flow_shift",
            kind="real",
            type="float",
            default="the model's",
            about="Shift of the noise schedule, above 0; higher spends more steps on layout.",
        ),
        ColumnRule(
            name="preset",
            kind="text",
            type="string",
            default="`--preset`",
            about="`exact`: the numbers of the reference pipeline. `fast`: approximations behind a quality "
            "gate. `turbo`: a few steps without guidance, with weights that were trained for it.",
        ),
        ColumnRule(
            name="model",
            kind="text",
            type="string",
            default="`--model`",
            about="An alias from the config, a local folder, or a hub id with `@revision`.",
        ),
        ColumnRule(
            name="lora",
            kind="text",
            type="string",
            default="none",
            about="LoRAs to render with: safetensors files, folders, or hub ids with `@revision`, joined by "
            "commas, each with `=0.8` behind it for a strength other than 1.",
        ),
        ColumnRule(
            name="image", kind="reserved", type="-", default="-", about="Not supported yet: leave null."
        ),
        ColumnRule(
            name="priority",
            kind="whole",
            type="int",
            default="0",
            about="Higher is rendered first.",
            pixel=False,
        ),
        ColumnRule(
            name="price",
            kind="price",
            type="decimal",
            default="`--price-...`",
            about="What this clip earns; at most 6 decimals.",
            pixel=False,
        ),
    )
}

# Names of other tools for what a known column sets: as a tag they would be ignored without a word.
_OTHER_NAMES = {
    "guidance": "guidance_scale",
    "cfg": "guidance_scale",
    "cfgscale": "guidance_scale",
    "frames": "num_frames",
    "nframes": "num_frames",
    "framecount": "num_frames",
    "framerate": "fps",
    "numinferencesteps": "steps",
    "inferencesteps": "steps",
    "negative": "negative_prompt",
    "shift": "flow_shift",
    "text": "prompt",
    "caption": "prompt",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a file's columns are. known: columns of the manifest; tags: carried along;
    dropped: pandas' indexes."""

    known: tuple[str, ...]
    tags: tuple[str, ...]
    dropped: tuple[str, ...]


def file_layout(schema: pa.Schema, *, file: str, declared_tags: frozenset[str]) -> Layout:
    """Sort a file's columns. Raises ManifestError for a name that appears twice, MissingColumn without
    `prompt`, UnknownColumn for one that looks like a known name and is not a declared tag."""
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise ManifestError(
            f"two columns of the same name in `{file}`: `{twice[0]}`", hint="rename or drop one of them"
        )
    indexes = _pandas_indexes(schema) - declared_tags
    known = tuple(name for name in schema.names if name in RULES)
    others = [name for name in schema.names if name not in RULES]
    for name in others:
        if name not in indexes and name not in declared_tags:
            _refuse_near_miss(name, present=known, file=file)
    if "prompt" not in known:
        raise MissingColumn(
            f"no `prompt` column in `{file}`; its columns: {', '.join(schema.names) or 'none'}",
            hint="`vgbatch manifest template` shows every column",
        )
    return Layout(
        known=known,
        tags=tuple(name for name in others if name not in indexes),
        dropped=tuple(name for name in others if name in indexes),
    )


def _pandas_indexes(schema: pa.Schema) -> frozenset[str]:
    found = {name for name in schema.names if re.fullmatch(r"__index_level_\d+__", name)}
    try:
        metadata = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
        found.update(name for name in metadata.get("index_columns", ()) if isinstance(name, str))
    except (ValueError, AttributeError):
        pass  # somebody else's metadata under pandas' key decides nothing
    return frozenset(found)


def _refuse_near_miss(name: str, *, present: tuple[str, ...], file: str) -> None:
    meant = close_to(name)
    if meant is None:
        return
    also = f" beside `{meant}`" if meant in present else ""
    raise UnknownColumn(
        f"unknown column in `{file}`{also}: `{name}`; close to the known column `{meant}`",
        hint=f"rename it to `{meant}`, or keep it as a tag with `--tag {name}`",
    )


def close_to(name: str) -> str | None:
    """The known column that a name was probably meant to be, or None."""
    squeezed = _squeeze(name)
    if squeezed in _OTHER_NAMES:
        return _OTHER_NAMES[squeezed]
    distances = {known: _edits(squeezed, _squeeze(known)) for known in RULES}
    best = min(distances, key=lambda known: distances[known])
    # A short name has many innocent neighbours (`uid`, `prompt_id`), a long one hardly any.
    shorter = min(len(squeezed), len(_squeeze(best)))
    allowed = 0 if shorter < 4 else 1 if shorter < 8 else 2
    return best if distances[best] <= allowed else None


def _squeeze(name: str) -> str:
    return re.sub(r"[\s_.-]+", "", name).lower()


def _edits(a: str, b: str) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours that turn a into b
    (optimal string alignment)."""
    if abs(len(a) - len(b)) > 2:
        return 3
    before: list[int] = []
    above = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], before[j - 2] + 1)
        before, above = above, row
    return above[-1]
