"""One record batch of a manifest: every rule applied, every default filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manifests.arrays import Ints, phrase, repeated, spread
from manifests.columns import Given, Rates, id_texts, prices, rates, real_numbers, texts, whole_numbers
from manifests.errors import ModelError
from manifests.identity import Hashes, row_hashes
from manifests.job import Weights
from manifests.model_spec import FindSpec, ModelSpec
from manifests.names import RULES
from manifests.presets import PRESETS, TURBO
from manifests.rows import Rows
from manifests.settings import ReadSettings
from manifests.shapes import RowModels, shapes
from manifests.sources import is_url
from manifests.table import JOBS_SCHEMA
from manifests.tags import tag_maps
from manifests.wording import counted

D = TypeVar("D", str, None)

LONGEST_ID_BYTES = 1024
_INT32_MAX = 2**31 - 1

# Until their fingerprint exists, JOBS_SCHEMA without it; id and seed are null where they will be derived.
UNNAMED_SCHEMA = pa.schema(
    [field.with_nullable(True) for field in JOBS_SCHEMA if field.name != "fingerprint"]
)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """jobs: the good rows, as UNNAMED_SCHEMA. rejected: the others, as REJECTED_SCHEMA.
    hashes: of each good row's pixel columns as written; None when every row has an id."""

    jobs: pa.RecordBatch
    rejected: pa.Table
    hashes: Hashes | None


# Beyond, some number of steps has no such number of different noise levels in fp32.
LEAST_FLOW_SHIFT, MOST_FLOW_SHIFT = 0.01, 100


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Why rows have no weights: what is wrong with which of their columns."""

    column: str
    reason: str


class Models:
    """The models of a manifest, each looked up once. Raises ModelError for the default one."""

    def __init__(self, model_spec: FindSpec, *, default: str) -> None:
        self._model_spec = model_spec
        self.default = model_spec(Weights(default))
        self._found: dict[Weights, ModelSpec | Missing] = {Weights(default): self.default}

    def find(self, weights: Weights) -> ModelSpec | Missing:
        if weights not in self._found:
            self._found[weights] = self._look_up(weights)
        return self._found[weights]

    def _look_up(self, weights: Weights) -> ModelSpec | Missing:
        model, lora, few_step = weights
        simpler = Weights(model, lora) if few_step else Weights(model)
        if simpler != weights and isinstance(missing := self.find(simpler), Missing):
            return missing
        column = "preset" if few_step else "model" if lora is None else "lora"
        name = model if lora is None else lora
        if column != "preset" and (complaint := _name_complaint(name, column)):
            return Missing(column=column, reason=complaint)
        try:
            return self._model_spec(weights)
        except ModelError as error:
            return Missing(column=column, reason=error.advice)


def _name_complaint(name: str, column: str) -> str | None:
    if is_url(name):
        return f"a URL as {column} is not supported yet; use a local path or a hub id"
    return None if name.strip() else f"empty; name a {column}, or leave it null for the default"


def validate(rows: Rows, *, tags: Sequence[str], models: Models, settings: ReadSettings) -> Checked:
    """Apply every rule to a batch. A row is given up for the first rule it breaks."""
    tag_column = tag_maps(rows, tags)
    named = _named(rows)
    _reject_reserved(rows)
    presets, preset_codes = _presets(rows, default=settings.preset)
    weights, row_models = _models(rows, models, default=settings.model, presets=presets, codes=preset_codes)
    columns = named | _shapes(rows, row_models) | _numbers(rows, row_models)
    _warn_of_tokens(rows, row_models)
    columns |= {"row": rows.numbers, "tags": tag_column, "warning": rows.warnings()}

    keep = np.flatnonzero(rows.ok)
    constants = {
        "file": repeated(rows.file, len(keep)),
        "model": spread([one.model for one in weights], row_models.codes[keep]),
        "lora": _loras(weights, row_models.codes[keep]),
        "model_revision": spread([spec.revision for spec in row_models.specs], row_models.codes[keep]),
        "preset": spread(presets, preset_codes[keep]),
        "crf": np.full(len(keep), settings.crf, np.int32),
        "encoder_preset": repeated(settings.encoder_preset, len(keep)),
    }
    good = _take(columns, keep, count=len(rows))
    defaults = spread([spec.default_negative_prompt for spec in row_models.specs], row_models.codes[keep])
    good["negative_prompt"] = _filled(good["negative_prompt"], defaults)
    return Checked(
        jobs=_as_batch(good | constants),
        rejected=rows.rejected(ids=named["id"], tags=tag_column),
        hashes=_hashes(rows, keep) if good["id"].null_count else None,
    )


# ---- what a row is called and shows ------------------------------------------------------------------


def _named(rows: Rows) -> dict[str, pa.Array]:
    prompt = texts(rows, "prompt")
    rows.reject(_mask(pc.is_null(prompt)), "prompt", "missing; every row needs a prompt")
    rows.reject(_mask(pc.equal(pc.utf8_trim_whitespace(prompt), "")), "prompt", "empty; say what to show")
    ids = id_texts(rows)
    rows.reject(_mask(pc.equal(ids, "")), "id", "empty; give it a name, or null for one made from the row")
    rows.reject(_mask(pc.match_substring(ids, "\0")), "id", "must not contain a zero byte")
    long = _mask(pc.greater(pc.binary_length(ids), LONGEST_ID_BYTES))
    rows.reject(long, "id", f"must be at most {LONGEST_ID_BYTES} bytes")
    return {"prompt": prompt, "id": ids, "negative_prompt": texts(rows, "negative_prompt")}


def _reject_reserved(rows: Rows) -> None:
    for rule in RULES.values():
        column = rows.column(rule.name) if rule.kind == "reserved" else None
        if column is not None:
            rows.reject(_mask(column.is_valid()), rule.name, "not supported yet; leave it null")


def _distinct(column: pa.Array, *, default: D) -> tuple[list[str | D], Ints]:
    """The texts of a column, default first, and which of them each row has."""
    encoded: pa.DictionaryArray = column.dictionary_encode()
    indexes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return [default, *encoded.dictionary.to_pylist()], indexes + 1


def _models(
    rows: Rows, models: Models, *, default: str, presets: Sequence[str], codes: Ints
) -> tuple[list[Weights], RowModels]:
    """presets, codes: of `_presets`."""
    names, name_codes = _distinct(texts(rows, "model"), default=default)
    loras, lora_codes = _distinct(texts(rows, "lora"), default=None)
    is_few_step = np.array([preset == TURBO for preset in presets])[codes]
    asked = (name_codes * len(loras) + lora_codes) * 2 + is_few_step
    kinds, kind_codes = np.unique(asked, return_inverse=True)
    weights = [Weights(names[k // 2 // len(loras)], loras[k // 2 % len(loras)], bool(k % 2)) for k in kinds]
    found = [models.find(one) for one in weights]
    for column in ("model", "lora", "preset"):
        reasons = [one.reason if isinstance(one, Missing) and one.column == column else "" for one in found]
        _reject_coded(rows, column, reasons, kind_codes)
    # Rows of unknown models are gone, but whole columns are computed: the default's numbers stand in.
    specs = [models.default if isinstance(one, Missing) else one for one in found]
    return weights, RowModels(specs=specs or [models.default], codes=kind_codes)


def _loras(weights: Sequence[Weights], codes: Ints) -> pa.Array:
    loras = pa.array([one.lora for one in weights], pa.string())
    return loras.take(pa.array(codes)) if loras.null_count < len(loras) else pa.nulls(len(codes), pa.string())


def _reject_coded(rows: Rows, column: str, reasons: Sequence[str], codes: Ints) -> None:
    """reasons: empty where there is none. codes: which of them is each row's."""
    if any(reasons):
        bad = np.array([bool(reason) for reason in reasons])
        rows.reject(bad[codes], column, lambda i: reasons[codes[i]])


def _presets(rows: Rows, *, default: str) -> tuple[list[str], Ints]:
    names, codes = _distinct(texts(rows, "preset"), default=default)
    _reject_coded(rows, "preset", [preset_complaint(name) or "" for name in names], codes)
    return names, codes


def preset_complaint(name: str) -> str | None:
    """Why a preset cannot be used, or None."""
    return None if name in PRESETS else f"unknown; use one of {', '.join(PRESETS)}"


# ---- numbers ----------------------------------------------------------------------------------------


def _shapes(rows: Rows, models: RowModels) -> dict[str, Ints]:
    written = rates(rows)
    usual = [spec.default_fps for spec in models.specs]
    num = np.array([rate.numerator for rate in usual])[models.codes]
    den = np.array([rate.denominator for rate in usual])[models.codes]
    fps = Rates(
        num=np.where(written.given, written.num, num),
        den=np.where(written.given, written.den, den),
        given=written.given,
    )
    shape = shapes(rows, models=models, fps=fps)
    return {"fps_num": fps.num, "fps_den": fps.den} | vars(shape)


def _numbers(rows: Rows, models: RowModels) -> dict[str, Any]:
    seed = whole_numbers(
        rows, "seed", low=0, high=2**63 - 1, valid="a whole number from 0 to 9223372036854775807"
    )
    steps = whole_numbers(rows, "steps", low=1, high=1000, valid="a whole number from 1 to 1000")
    priority = whole_numbers(
        rows, "priority", low=-_INT32_MAX, high=_INT32_MAX, valid="a whole number within 2147483647 of 0"
    )
    guidance = _guidance(rows, "guidance_scale")
    _reject_guided_few_steps(rows, models, steps, guidance)
    shift = real_numbers(
        rows,
        "flow_shift",
        accepts=lambda x: (x >= LEAST_FLOW_SHIFT) & (x <= MOST_FLOW_SHIFT),
        valid=f"{LEAST_FLOW_SHIFT} to {MOST_FLOW_SHIFT}; published models use 3 to 12",
    )
    return {
        "seed": pa.array(seed.values, mask=~seed.given),
        "steps": steps.or_default(models.each("default_steps")),
        "priority": priority.values,
        "guidance_scale": guidance.or_default(models.each_float("default_guidance_scale")),
        "guidance_scale_2": _second_guidance(rows, models),
        "flow_shift": shift.or_default(models.each_float("default_flow_shift")),
        "price": prices(rows),
    }


def _reject_guided_few_steps(rows: Rows, models: RowModels, steps: Given, guidance: Given) -> None:
    """What was trained for a few steps without guidance gives a ruined picture with more of either."""
    is_few_step = models.each_true("few_step")
    if not is_few_step.any():
        return
    rows.reject(
        is_few_step & steps.given & (steps.values != models.each("default_steps")),
        "steps",
        lambda i: (
            f"{models.spec(i).few_step} takes exactly "
            f"{counted(models.spec(i).default_steps, 'step')}; leave it null"
        ),
    )
    rows.reject(
        is_few_step & guidance.given & (guidance.values > 1),
        "guidance_scale",
        lambda i: f"{models.spec(i).few_step} was trained to go without guidance; leave it null",
    )


def _guidance(rows: Rows, name: str) -> Given:
    return real_numbers(rows, name, accepts=lambda x: (x >= 0) & (x <= 100), valid="0 to 100")


def _second_guidance(rows: Rows, models: RowModels) -> pa.Array:
    second = _guidance(rows, "guidance_scale_2")
    useless = second.given & (models.each("two_experts") == 0)
    rows.reject(useless, "guidance_scale_2", "the model has one transformer only; leave it null")
    values = second.or_default(models.each_float("default_guidance_scale_2"))
    return pa.array(values, mask=np.isnan(values))


# ---- prompts longer than the encoder reads ----------------------------------------------------------


def _warn_of_tokens(rows: Rows, models: RowModels) -> None:
    limits = models.each("max_tokens")
    for name in ("prompt", "negative_prompt"):
        column = rows.written.get(name)
        if column is not None:
            counts = _token_counts(column, models, limits=np.where(rows.ok, limits, _INT32_MAX))
            _warn_of_count(rows, name, counts, limits)


def _warn_of_count(rows: Rows, name: str, counts: Ints, limits: Ints) -> None:
    rows.warn(
        counts > limits,
        lambda: phrase(f"{name} has ", counts, " tokens, the encoder reads ", limits, ": the rest is cut"),
    )


def _token_counts(column: pa.Array, models: RowModels, *, limits: Ints) -> Ints:
    """Tokens of the texts that could have too many: a token is at least one byte. 0 for the others."""
    counts = np.zeros(len(column), np.int64)
    size_bytes = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    for code, spec in enumerate(models.specs):
        long = np.flatnonzero((models.codes == code) & (size_bytes > limits))
        if len(long):
            counts[long] = spec.count_tokens(column.take(pa.array(long)).to_pylist())
    return counts


# ---- back to Arrow ----------------------------------------------------------------------------------


def _take(columns: Mapping[str, Any], keep: Ints, *, count: int) -> dict[str, pa.Array]:
    arrays = {name: pa.array(column) for name, column in columns.items()}
    if len(keep) == count:
        return arrays
    return {name: array.take(pa.array(keep)) for name, array in arrays.items()}


def _filled(column: pa.Array, defaults: pa.Array) -> pa.Array:
    if column.null_count == len(column):
        return defaults
    return pc.coalesce(column, defaults) if column.null_count else column


def _as_batch(columns: Mapping[str, Any]) -> pa.RecordBatch:
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in UNNAMED_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=UNNAMED_SCHEMA)


def _hashes(rows: Rows, keep: Ints) -> Hashes:
    pixels = {name: rows.written[name] for name, rule in RULES.items() if rule.pixel and name in rows.written}
    return row_hashes(_take(pixels, keep, count=len(rows)))


def _mask(flags: pa.Array) -> Any:
    return pc.fill_null(flags, False).to_numpy(zero_copy_only=False)
