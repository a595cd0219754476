"""Without a card, kernels run in Triton's interpreter, which must be asked for before Triton is imported."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from typing import Any

import pytest


def has_card() -> bool:
    """Asked of the driver, as importing torch would slow down every test that needs none."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


@pytest.fixture
def interpreter_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy 2.4 no longer makes an integer of an array of one element, which is what the bounds of Triton's
    interpreted loops are."""
    if has_card() or not find_spec("triton"):
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


collect_ignore: list[str] = []
if not has_card():
    os.environ["TRITON_INTERPRET"] = "1"
    collect_ignore += [
        "test_pipeline_on_card.py",
        "test_pipeline_on_card_fp8.py",
        "test_pipeline_on_card_sparse.py",
    ]
