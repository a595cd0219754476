"""What `vgbatch verify` found, kept with what it was found of, in an open ledger."""

from __future__ import annotations

from typing import Any

from storage.arrow import to_arrow
from storage.rows import VerificationRow


def add(connection: Any, row: VerificationRow) -> None:
    connection.register("incoming", to_arrow([row], table="verifications"))
    connection.execute("INSERT INTO verifications BY NAME FROM incoming")
    connection.unregister("incoming")


def last(
    connection: Any, *, model_revision: str, lora: str | None, preset: str, numerics: str, gpu_name: str
) -> VerificationRow | None:
    """The latest of this preset against the same model's `exact`; None when there is none."""
    found = connection.sql(
        """
        FROM verifications
        WHERE model_revision = $model_revision AND lora IS NOT DISTINCT FROM $lora::VARCHAR
            AND preset = $preset AND numerics = $numerics AND gpu_name = $gpu_name
            AND reference_model = model AND reference_preset = 'exact'
        ORDER BY verified_at DESC LIMIT 1
        """,
        params={
            "model_revision": model_revision,
            "lora": lora,
            "preset": preset,
            "numerics": numerics,
            "gpu_name": gpu_name,
        },
    ).to_arrow_table()
    return VerificationRow(**found.to_pylist()[0]) if found.num_rows else None
