from __future__ import annotations

from hashlib import sha256

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from manifests.arrays import CHUNK_ROWS, float_texts, gather, hex_texts, joined, phrase, sha256_rows, spread


def chunked_table(*, chunks: int = 5, rows: int = 2000) -> pa.Table:
    return pa.concat_tables(
        [
            pa.table(
                {
                    "text": [f"text {chunk} {row}" for row in range(rows)],
                    "same": pa.repeat("one", rows),
                    "number": pa.array(range(rows), mask=np.arange(rows) % 3 == 0),
                    "map": pa.array(
                        [[("k", str(row))] for row in range(rows)], pa.map_(pa.string(), pa.string())
                    ),
                }
            )
            for chunk in range(chunks)
        ]
    )


ORDERS = {
    "all in order": np.arange(10_000),
    "none": np.arange(0),
    "one": np.array([7777]),
    "two interleaved halves": np.concatenate([np.arange(0, 10_000, 2), np.arange(1, 10_000, 2)]),
    "backwards": np.arange(10_000)[::-1].copy(),
    "shuffled": np.random.default_rng(0).permutation(10_000),
    "with repeats": np.random.default_rng(1).integers(0, 10_000, 30_000),
}


@pytest.mark.parametrize("order", ORDERS)
def test_gather_is_take(order: str) -> None:
    table, rows = chunked_table(), ORDERS[order]
    gathered = gather(table, rows)
    gathered.validate(full=True)
    assert gathered.equals(table.take(pa.array(rows)))


def test_gather_of_all_rows_copies_nothing() -> None:
    table = chunked_table()
    before = pa.total_allocated_bytes()
    kept = gather(table, np.arange(table.num_rows))
    assert kept.equals(table)
    assert pa.total_allocated_bytes() == before


def test_a_constant_column_shares_its_memory() -> None:
    rows: npt.NDArray[np.int64] = np.zeros(10 * CHUNK_ROWS, np.int64)
    column = gather(pa.table({"same": ["x" * 100, "x" * 100]}), rows)["same"]
    assert len(column) == len(rows)
    assert len({chunk.buffers()[2].address for chunk in column.chunks}) == 1


def test_joined_keeps_rows_without_any_part() -> None:
    one, two = pa.array(["a", None, None, "d"]), pa.array(["x", "y", None, None])
    assert joined([one, two], "; ").to_pylist() == ["a; x", "y", None, "d"]
    assert joined([one], "; ").to_pylist() == ["a", None, None, "d"]


def test_phrases_mix_text_and_numbers() -> None:
    numbers = pa.array([1, None])
    assert phrase("n=", numbers, "/", np.array([2.5, 3.0])).to_pylist() == ["n=1/2.5", None]


def test_floats_are_written_so_that_they_read_back() -> None:
    values = [5.0, 0.1, 1e-7, 1e22, 1 / 3]
    texts = float_texts(pa.array(values)).to_pylist()
    assert texts == ["5.0", "0.1", "1e-07", "1e+22", "0.3333333333333333"]


def test_hashes_are_those_of_the_rows() -> None:
    texts = ["", "a", "é" * 100, "\0"]
    array = pa.array(["skipped", *texts]).slice(1)
    assert hex_texts(sha256_rows(array)).to_pylist() == [sha256(text.encode()).hexdigest() for text in texts]
    assert sha256_rows(pa.array([], pa.string())).shape == (0, 32)


def test_spread_picks_by_code() -> None:
    assert spread(["a", "b"], np.array([1, 0, 1])).to_pylist() == ["b", "a", "b"]
    assert spread(["a", "b"], np.array([1, 1])).to_pylist() == ["b", "b"]
    assert spread(["a"], np.array([], np.int64)).to_pylist() == []
