"""Writes demo.parquet beside itself: `python manifests/examples/make_demo.py`.

Twelve rows over three buckets of the built-in model; one row, with an odd width, is there to be rejected.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

TARGET = Path(__file__).with_name("demo.parquet")
FPS = 8

# prompt, width, height, num_frames, customer, price
ROWS = [
    ("a red circle moves left on a blue background", 64, 64, 17, "acme", "0.05"),
    ("a green square moves right on a white background", 64, 64, 17, "acme", "0.05"),
    ("a yellow triangle moves up on a black background", 64, 64, 17, "acme", "0.05"),
    ("a white circle moves down on a red background", 64, 64, 17, "globex", "0.04"),
    ("a blue square moves left on a yellow background", 96, 64, 17, "globex", "0.08"),
    ("a red triangle moves right on a green background", 96, 64, 17, "globex", "0.08"),
    ("a black circle moves up on a white background", 96, 64, 17, "acme", "0.08"),
    ("a yellow square moves down on a blue background", 96, 64, 17, "acme", "0.08"),
    ("a green circle moves left on a black background", 64, 96, 9, "initech", "0.03"),
    ("a white triangle moves right on a red background", 64, 96, 9, "initech", "0.03"),
    ("a blue circle moves up on a green background", 65, 64, 17, "initech", "0.03"),
    ("a red square moves down on a white background", 64, 96, 9, "initech", "0.03"),
]


def demo_table() -> pa.Table:
    prompts, widths, heights, frames, customers, prices = zip(*ROWS, strict=True)
    return pa.table(
        {
            "id": [f"demo-{number:02d}" for number in range(1, len(ROWS) + 1)],
            "prompt": list(prompts),
            "width": pa.array(widths, pa.int32()),
            "height": pa.array(heights, pa.int32()),
            "num_frames": pa.array(frames, pa.int32()),
            "fps": pa.array([FPS] * len(ROWS), pa.float64()),
            "seed": pa.array(range(1001, 1001 + len(ROWS)), pa.int64()),
            "price": pa.array([Decimal(price) for price in prices], pa.decimal128(18, 6)),
            "customer": list(customers),
        }
    )


if __name__ == "__main__":
    pq.write_table(demo_table(), TARGET)
