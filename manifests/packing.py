"""Jobs into static batches: buckets, caps, order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from manifests.arrays import Ints
from manifests.job import Bucket
from manifests.model_spec import FindSpec
from manifests.table import BUCKET_COLUMNS, bucket_from_row

# Jobs `start` to `stop` of the plan are one batch of `size` slots; `priority` is its first job's.
BATCHES_SCHEMA = pa.schema(
    [
        pa.field("number", pa.int64(), nullable=False),
        pa.field("bucket", pa.int32(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
        pa.field("size", pa.int32(), nullable=False),
        pa.field("cap", pa.int32(), nullable=False),
        pa.field("priority", pa.int32(), nullable=False),
    ]
)


# Where a bucket's cap comes from: the model's rule, a measurement, or a batch that did not fit.
RULE, PROBE, OUT_OF_MEMORY = "rule", "probe", "out of memory"


@dataclass(frozen=True, kw_only=True)
class Packing:
    """order: rows of the jobs table in the order they are rendered. batches: BATCHES_SCHEMA, ranges of
    that order; `bucket` indexes buckets. cap_sources: of RULE, PROBE, OUT_OF_MEMORY, one for each bucket."""

    order: Ints
    buckets: tuple[Bucket, ...]
    cap_sources: tuple[str, ...]
    batches: pa.Table


def pack(
    jobs: pa.Table,
    todo: Ints,
    *,
    model_spec: FindSpec,
    probed: Mapping[str, int],
    caps: Mapping[str, int],
) -> Packing:
    """Pack the rows `todo` of jobs. In a bucket, high priority comes first, then the manifest's order,
    cut at the cap; batches come by the priority of their first job, then by model and bucket.

    probed, caps: as History has them."""
    buckets, bucket = _buckets(jobs, todo)
    found = [_cap(one, model_spec=model_spec, probed=probed, caps=caps) for one in buckets]
    cap = np.array([size for size, _ in found], np.int64)
    priority = jobs["priority"].to_numpy()[todo].astype(np.int64)
    by_bucket = np.lexsort((-priority, bucket))
    count = np.bincount(bucket, minlength=len(buckets))

    of_bucket, start, stop = _cut(count, cap)
    first_priority = priority[by_bucket[start]]
    # start grows with bucket and position, and buckets are sorted by model.
    by_priority = np.lexsort((start, -first_priority))
    of_bucket, start, stop, first_priority = (
        column[by_priority] for column in (of_bucket, start, stop, first_priority)
    )
    ends = np.cumsum(stop - start)
    begins = ends - (stop - start)
    rows = np.arange(len(todo)) + np.repeat(start - begins, stop - start)
    size = np.minimum(cap, _next_power_of_two(count))
    columns = (
        np.arange(len(start)),
        of_bucket,
        begins,
        ends,
        size[of_bucket],
        cap[of_bucket],
        first_priority,
    )
    return Packing(
        order=todo[by_bucket[rows]],
        buckets=buckets,
        cap_sources=tuple(source for _, source in found),
        batches=pa.table(
            [
                pa.array(column).cast(field.type)
                for column, field in zip(columns, BATCHES_SCHEMA, strict=True)
            ],
            schema=BATCHES_SCHEMA,
        ),
    )


def _cut(count: Ints, cap: Ints) -> tuple[Ints, Ints, Ints]:
    """Jobs sorted by bucket, cut at the caps: each batch's bucket, start and stop."""
    batches = -(-count // cap)
    of_bucket = np.repeat(np.arange(len(count)), batches)
    position = np.arange(len(of_bucket)) - np.repeat(np.cumsum(batches) - batches, batches)
    end = np.cumsum(count)
    start = (end - count)[of_bucket] + position * cap[of_bucket]
    return of_bucket, start, np.minimum(start + cap[of_bucket], end[of_bucket])


def _next_power_of_two(count: Ints) -> Ints:
    return np.array([1 << (int(number) - 1).bit_length() for number in count], np.int64)


def _cap(
    bucket: Bucket,
    *,
    model_spec: FindSpec,
    probed: Mapping[str, int],
    caps: Mapping[str, int],
) -> tuple[int, str]:
    """The bucket's cap and where it comes from."""
    if bucket.key in probed:
        cap, source = probed[bucket.key], PROBE
    else:
        cap, source = model_spec(bucket.weights).cap(bucket.width, bucket.height, bucket.num_frames), RULE
    assert cap >= 1, f"{bucket.label}: a model that renders a size can render one clip of it"
    lowered = caps.get(bucket.key, cap)
    return (lowered, OUT_OF_MEMORY) if lowered < cap else (cap, source)


def _buckets(jobs: pa.Table, todo: Ints) -> tuple[tuple[Bucket, ...], Ints]:
    """The buckets of the rows, sorted by their values alone, and the index of each row's."""
    _, first, code = np.unique(_codes(jobs)[todo], return_index=True, return_inverse=True)
    examples = jobs.select(BUCKET_COLUMNS).take(pa.array(todo[first])).to_pylist()
    found = [bucket_from_row(row) for row in examples]
    order = sorted(range(len(found)), key=lambda index: _sort_key(found[index]))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return tuple(found[index] for index in order), rank[code]


def _sort_key(bucket: Bucket) -> tuple[object, ...]:
    # None does not compare with floats.
    second = bucket.guidance_scale_2
    size = (bucket.width * bucket.height * bucket.num_frames, bucket.width, bucket.height)
    guidance = (bucket.guidance_scale, second is not None, second or 0.0, bucket.flow_shift)
    return (bucket.model, bucket.lora or "", bucket.revision, bucket.preset, *size, bucket.steps, *guidance)


def _codes(jobs: pa.Table) -> Ints:
    """A number for each row; two rows have the same one when they agree in BUCKET_COLUMNS."""
    codes = np.zeros(jobs.num_rows, np.int64)
    for name in BUCKET_COLUMNS:
        encoded = jobs[name].dictionary_encode(null_encoding="encode")
        indices = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in encoded.chunks]
        if indices:
            column = np.concatenate(indices).astype(np.int64)
            # Dense again after each column: the product of many distinct values would pass int64.
            codes = _dense(codes * (int(column.max(initial=0)) + 1) + column)
    return codes


def _dense(codes: Ints) -> Ints:
    if codes.max(initial=0) < 1 << 31:
        return codes
    return np.unique(codes, return_inverse=True)[1]
