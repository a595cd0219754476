"""LoRAs and few-step weights: what a row asks for, which rows share a batch, what is refused."""

from __future__ import annotations

from pathlib import Path

from manifests.job import Weights
from tests.manifest_cases import read_columns, verdicts
from tests.test_manifests_planner import plan_of


def test_rows_of_different_loras_share_no_batch(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"lora": [None, "a.safetensors", "b.safetensors", "a.safetensors"]})
    assert reading.jobs["model_revision"].to_pylist() == [
        "rev-1",
        "rev-1+a.safetensors",
        "rev-1+b.safetensors",
        "rev-1+a.safetensors",
    ]
    made = plan_of(reading)
    batches = [made.batch(number) for number in range(made.batches.num_rows)]
    assert sorted([str(job.lora) for job in batch.jobs] for batch in batches) == [
        ["None"],
        ["a.safetensors", "a.safetensors"],
        ["b.safetensors"],
    ]
    assert {batch.bucket.weights for batch in batches} == {
        Weights("tiny", lora) for lora in (None, "a.safetensors", "b.safetensors")
    }


def test_a_lora_is_part_of_what_was_asked_for(tmp_path: Path) -> None:
    columns = {"id": ["a"], "prompt": ["a red circle"]}
    plain = read_columns(tmp_path, columns)
    styled, other = (read_columns(tmp_path, {**columns, "lora": [lora]}) for lora in ("s", "t"))
    assert len({one.jobs["fingerprint"][0].as_py() for one in (plain, styled, other)}) == 3
    null = read_columns(tmp_path, {**columns, "lora": [None]})
    assert null.jobs["fingerprint"].equals(plain.jobs["fingerprint"])


def test_buckets_without_a_lora_keep_the_key_they_had(tmp_path: Path) -> None:
    made = plan_of(read_columns(tmp_path, {"lora": [None, "a"]}))
    plain, styled = made.buckets
    assert plain.key != styled.key
    assert (plain.lora, plain.key) == (None, "ca9f399d6e1c")


def test_a_lora_that_cannot_be_had_rejects_its_row(tmp_path: Path) -> None:
    loras = ["none.safetensors", "", "https://host/x.safetensors", "a.safetensors"]
    reading = read_columns(tmp_path, {"lora": loras})
    assert verdicts(reading) == {0: "lora", 1: "lora", 2: "lora", 3: "ok"}
    reasons = reading.rejected["reason"].to_pylist()
    assert "no such LoRA" in reasons[0]
    assert "empty" in reasons[1]
    assert "not supported yet" in reasons[2]


def test_a_missing_model_is_told_before_its_lora_and_preset(tmp_path: Path) -> None:
    reading = read_columns(tmp_path, {"model": ["no"], "lora": ["none.safetensors"], "preset": ["turbo"]})
    assert verdicts(reading) == {0: "model"}


def test_turbo_takes_few_step_weights_and_their_defaults(tmp_path: Path) -> None:
    reading = read_columns(
        tmp_path, {"preset": ["turbo", "exact", "turbo"], "model": ["tiny", "tiny", "moe"]}
    )
    assert verdicts(reading) == {0: "ok", 1: "ok", 2: "preset"}
    assert "few steps" in reading.rejected["reason"][0].as_py()
    few, many = reading.jobs.to_pylist()
    assert (few["guidance_scale"], few["model_revision"]) == (1.0, "rev-3")
    assert (many["guidance_scale"], many["model_revision"]) == (5.0, "rev-1")


def test_few_step_weights_refuse_guidance_and_other_steps(tmp_path: Path) -> None:
    reading = read_columns(
        tmp_path,
        {
            "model": ["distilled"] * 6 + ["tiny"],
            "steps": [None, 4, 50, None, None, 4, 50],
            "guidance_scale": [None, None, None, 5.0, 1.0, 0.0, 5.0],
        },
    )
    assert verdicts(reading) == {
        0: "ok", 1: "ok", 2: "steps", 3: "guidance_scale", 4: "ok", 5: "ok", 6: "ok"
    }  # fmt: skip
    reasons = reading.rejected["reason"].to_pylist()
    assert "the student takes exactly 4 steps" in reasons[0]
    assert "without guidance" in reasons[1]
