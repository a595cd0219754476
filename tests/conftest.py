"""Without a card, kernels run in Triton's interpreter, which must be asked for before Triton is imported."""

from __future__ import annotations

import ctypes
import os


def has_card() -> bool:
    """Asked of the driver, as importing torch would slow down every test that needs none."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


collect_ignore: list[str] = []
if not has_card():
    os.environ["TRITON_INTERPRET"] = "1"
    collect_ignore += ["test_pipeline_on_card.py", "test_pipeline_on_card_fp8.py"]
