"""Every fold, off and on: the work is done once, the numbers are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.graph.fold import fuse_linears
from pipeline.models.wan_transformer import WanTransformer
from tests.test_pipeline_wan_transformer import inputs, make_module

ROWS = 512
TIMESTEPS = torch.tensor([999, 713, 250, 3])


def padded_text(*counts: int) -> torch.Tensor:
    text = torch.randn((len(counts), ROWS, 16), generator=torch.Generator().manual_seed(3))
    for row, count in zip(text, counts, strict=True):
        row[count:] = 0
    return text


def velocities(transformer: WanTransformer, texts: list[torch.Tensor], counts: list[list[int]]) -> Any:
    keys = [
        transformer.text_keys(text, torch.tensor(rows, dtype=torch.int32))
        for text, rows in zip(texts, counts, strict=True)
    ]
    tables = transformer.step_tables(TIMESTEPS[1:2])
    return transformer(inputs()[0], blocks_L6D=tables.blocks_SL6D[0], head_2D=tables.head_S2D[0], texts=keys)


def test_padding_as_one_key_weighs_as_much_as_all_of_its_rows() -> None:
    module = make_module()
    counts = [7, 400]
    text = padded_text(*counts)
    (folded,) = velocities(WanTransformer(module), [text], [counts])
    (unfolded,) = velocities(WanTransformer(module), [text], [[ROWS, ROWS]])
    expected = module(inputs()[0], TIMESTEPS[1].expand(2), text, return_dict=False)[0]
    torch.testing.assert_close(folded, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(unfolded, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    (wrong,) = velocities(WanTransformer(module), [text], [[count - 1 for count in counts]])
    assert (wrong - expected).abs().max() > 1e-3  # the last token taken for padding


@pytest.mark.parametrize("settings", [{}, {"cross_attn_norm": False}], ids=str)
def test_what_both_branches_share_is_computed_once(settings: dict[str, Any]) -> None:
    transformer = WanTransformer(make_module(**settings))
    texts, counts = [padded_text(9, 30), padded_text(0, 2)], [[9, 30], [0, 2]]
    together = velocities(transformer, texts, counts)
    for branch, text, rows in zip(together, texts, counts, strict=True):
        (alone,) = velocities(transformer, [text], [rows])
        assert torch.equal(branch, alone)


def test_tables_of_a_schedule_are_those_of_its_steps() -> None:
    transformer = WanTransformer(make_module())
    tables = transformer.step_tables(TIMESTEPS)
    for index, timestep in enumerate(TIMESTEPS):
        own = transformer.step_tables(timestep[None])
        torch.testing.assert_close(tables.blocks_SL6D[index], own.blocks_SL6D[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(tables.head_S2D[index], own.head_S2D[0], rtol=0, atol=1e-5)


def test_fused_linears_share_their_weights_with_the_module() -> None:
    linears = [torch.nn.Linear(6, size) for size in (4, 4, 5)]
    x = torch.randn(3, 6)
    expected = torch.cat([linear(x) for linear in linears], dim=-1)
    weight, bias = fuse_linears(linears)
    assert torch.equal(torch.cat([linear(x) for linear in linears], dim=-1), expected)
    torch.testing.assert_close(torch.nn.functional.linear(x, weight, bias), expected)
    with torch.no_grad():
        linears[1].weight.zero_()
    assert torch.count_nonzero(weight[4:8]) == 0
    assert weight.untyped_storage().data_ptr() == linears[2].weight.untyped_storage().data_ptr()
