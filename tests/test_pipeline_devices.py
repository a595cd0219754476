from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.config import EngineConfig, resolved
from pipeline.devices import device_memory_bytes, device_name, let_segments_grow, list_devices, versions


def test_devices_are_the_cards_or_the_cpu() -> None:
    devices = list_devices()
    assert len(devices) == max(1, torch.cuda.device_count())
    for device in devices:
        assert device_name(device)
        assert device_memory_bytes(device) > 2**28


def test_counting_devices_creates_no_cuda_context() -> None:
    code = "import torch, pipeline.devices as d; d.list_devices(); print(torch.cuda.is_initialized())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_versions_name_what_decides_the_pixels() -> None:
    known = versions()
    assert set(known) == {"torch", "diffusers", "transformers", "cuda"}
    assert known["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert known["cuda"] == (torch.version.cuda or "none")


def test_auto_precision_is_full_on_the_cpu_and_half_on_a_card() -> None:
    on_cpu = resolved(EngineConfig(device="cpu", models={}))
    on_card = resolved(EngineConfig(device="cuda:1", models={}))
    asked = resolved(EngineConfig(device="cpu", models={}, dtype="bfloat16"))
    assert (on_cpu.dtype, on_card.dtype, asked.dtype) == ("float32", "bfloat16", "bfloat16")
    assert (on_cpu.vae_dtype, on_card.vae_dtype) == ("float32", "bfloat16")
    assert resolved(on_card) is on_card


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_told_otherwise(given: str | None, policy: str) -> None:
    code = "import os, pipeline.rendering; print(os.environ['OMP_WAIT_POLICY'])"
    environment = {} if given is None else {"OMP_WAIT_POLICY": given}
    root = Path(__file__).parent.parent
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == policy


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_grow_unless_the_user_set_the_allocator(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append, raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    let_segments_grow()
    assert given == ["expandable_segments:True"]
    monkeypatch.setenv(variable, "max_split_size_mb:64")
    let_segments_grow()
    assert len(given) == 1
