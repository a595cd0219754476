"""Which models stay on a card."""

from __future__ import annotations

import pytest
from diffusers import WanTransformer3DModel
from torch import device as torch_device

from pipeline.memory.residency import is_streamed, smallest_card_bytes, transformer_bytes
from pipeline.models.resolve import resolve_model
from pipeline.models.shapes import PUBLISHED, Shape
from tests.conftest import has_card

GIB = 2**30


@pytest.mark.parametrize("shape", PUBLISHED, ids=lambda shape: shape.name)
def test_the_count_is_all_but_a_few_hundredths_of_a_published_models_weights(shape: Shape) -> None:
    with torch_device("meta"):
        module = WanTransformer3DModel(**shape.transformer)
    num_bytes = shape.num_experts * sum(2 * parameter.numel() for parameter in module.parameters())
    counted = transformer_bytes(shape.transformer, num_experts=shape.num_experts)
    assert 0.96 * num_bytes < counted < num_bytes


@pytest.mark.parametrize(
    ("name", "card_gib", "streamed"),
    [
        ("Wan2.2-TI2V-5B", 24, False),
        ("Wan2.2-TI2V-5B", 12, True),
        ("Wan2.1-T2V-14B", 80, False),
        ("Wan2.1-T2V-14B", 24, True),
        ("Wan2.1-T2V-1.3B", 8, False),
    ],
)
def test_a_model_that_leaves_room_for_a_clip_stays(name: str, card_gib: int, streamed: bool) -> None:
    (shape,) = (shape for shape in PUBLISHED if shape.name == name)
    num_bytes = transformer_bytes(shape.transformer, num_experts=shape.num_experts)
    assert is_streamed(num_bytes, card_bytes=card_gib * GIB) == streamed


def test_a_resolved_model_says_what_its_transformer_takes() -> None:
    assert 7e6 < resolve_model("builtin").transformer_bytes < 9e6  # 4.2 M parameters


def test_the_driver_says_how_large_a_card_is() -> None:
    size = smallest_card_bytes()
    assert (size is not None) == has_card()
    assert size is None or size > GIB
