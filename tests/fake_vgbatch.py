"""`vgbatch` with the fake engine in its workers: `python -m tests.fake_vgbatch run manifest.parquet`.

FAKE_KNOBS holds the Knobs as a Python expression.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import jobs.runner
from jobs.cli import main
from pipeline.config import ModelSource
from pipeline.rendering import Renderer
from tests import fake_engine
from tests.fake_engine import FakeEngine, Knobs


def build_renderer(device: str, *, models: Mapping[str, ModelSource]) -> Renderer:
    knobs: Knobs = eval(os.environ["FAKE_KNOBS"], vars(fake_engine))
    return FakeEngine(device, knobs=knobs)


if __name__ == "__main__":
    jobs.runner.build_renderer = build_renderer
    main()
