"""`vgbatch` with the fake engine in its workers: `python -m tests.fake_vgbatch run manifest.parquet`.

FAKE_KNOBS holds the Knobs as a Python expression.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import jobs.probing
import jobs.runner
from jobs.cli import main
from jobs.probing import StepTimer
from pipeline.config import EmbeddingStore, ModelSource
from pipeline.rendering import Renderer
from tests import fake_engine
from tests.fake_engine import FakeEngine, Knobs


def build_renderer(device: str, *, models: Mapping[str, ModelSource], embeddings: EmbeddingStore) -> Renderer:
    return FakeEngine(device, knobs=_knobs())


def build_step_timer(device: str, *, models: Mapping[str, ModelSource]) -> Renderer:
    return StepTimer(FakeEngine(device, knobs=_knobs()))


def _knobs() -> Knobs:
    knobs: Knobs = eval(os.environ["FAKE_KNOBS"], vars(fake_engine))
    return knobs


if __name__ == "__main__":
    jobs.runner.build_renderer = build_renderer
    jobs.probing.build_step_timer = build_step_timer
    main()
