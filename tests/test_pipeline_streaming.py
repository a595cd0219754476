"""Layers that wait on the host compute as they do on the device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pipeline.memory.streaming import StreamedLayers, map_tensors
from pipeline.models.wan_transformer import WanTransformer
from tests.test_pipeline_wan_transformer import forward, make_module

DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]


@dataclass(frozen=True)
class Inner:
    bias: torch.Tensor | None


@dataclass(frozen=True)
class Layer:
    number: int
    weight: torch.Tensor
    inner: Inner


def layers(count: int) -> list[Layer]:
    return [
        Layer(7, torch.full((3, 2), float(index)), Inner(torch.full((2,), -float(index))))
        for index in range(count)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_layer_comes_in_turn_every_time(count: int, device: str) -> None:
    streamed = StreamedLayers(layers(count), device=device)
    assert len(streamed) == count
    for _ in range(2):
        seen = []
        for layer in streamed:
            assert layer.number == 7
            assert layer.inner.bias is not None
            seen.append((layer.weight.sum() + layer.inner.bias.sum()).cpu().item())
        assert seen == [4.0 * index for index in range(count)]


@pytest.mark.parametrize("device", DEVICES)
def test_only_two_layers_are_on_the_device(device: str) -> None:
    streamed = StreamedLayers(layers(5), device=device)
    assert len({layer.weight.data_ptr() for layer in streamed}) == 2
    assert all(layer.weight.device.type == "cpu" for layer in streamed[:])


def test_tensors_deep_in_a_layer_are_reached_and_nothing_else_is() -> None:
    layer = Layer(7, torch.ones(2), Inner(None))
    doubled = map_tensors(layer, lambda tensor: tensor * 2)
    assert (doubled.number, doubled.inner) == (7, Inner(None))
    assert torch.equal(doubled.weight, torch.full((2,), 2.0))


@pytest.mark.parametrize("device", DEVICES)
def test_a_streamed_transformer_gives_the_same_velocity(device: str) -> None:
    resident = forward(WanTransformer(make_module()))
    streamed = forward(WanTransformer(make_module(), streamed_to=device))
    torch.testing.assert_close(streamed.cpu(), resident, rtol=0, atol=0 if device == "cpu" else 1e-5)
