"""A clip in tiles is the clip decoded whole: where tiles are cut, what they depend on, what they take."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from manifests.job import Job
from pipeline.models import wan
from pipeline.models.protocol import Piece, joined
from pipeline.models.resolve import resolve_model
from pipeline.models.wan import WanModel
from pipeline.models.wan_vae.decoder import WanDecoder, _part
from pipeline.models.wan_vae.tiles import (
    WHOLE,
    Grid,
    cheapest_grid,
    halo_width,
    spans,
    tile_length,
    tiles,
)
from tests.pipeline_checkpoints import build_checkpoint, make_batch, make_engine, make_job
from tests.pipeline_ops import rand
from tests.pipeline_vaes import KINDS, WAN22, Pair, diffusers_rgb, make_decoder, make_vae

GIB = 2**30
WAN22_RADII, WAN22_CELL = [6, 7, 7, 8], 2


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def reached(seen: np.ndarray, radii: list[int], *, cell: int) -> np.ndarray:
    """Which pixels of a side depend on the latents that are marked, by marking layer after layer."""
    for index, radius in enumerate(radii):
        marked = seen if index == 0 else seen.repeat(2)
        seen = np.convolve(marked, np.ones(2 * radius + 1), mode="full")[radius : radius + len(marked)] > 0
    return seen.repeat(cell)


@pytest.mark.parametrize("cell", [1, 2])
@pytest.mark.parametrize(
    "radii", [WAN22_RADII, [4, 5, 5, 6], [0, 0, 0, 1], [3, 0, 2], [1, 1], [0, 7, 0, 3], [2]], ids=str
)
def test_a_halo_is_what_a_tile_depends_on_and_no_more(radii: list[int], cell: int) -> None:
    scale, halo = cell * 2 ** (len(radii) - 1), halo_width(radii, cell=cell)
    start, stop = 2 * halo + 2, 2 * halo + 5
    own = slice(start * scale, stop * scale + 1)  # with the pixel that it shares
    latents = np.arange(stop + 2 * halo + 2)
    needed = [bool(reached(latents == place, radii, cell=cell)[own].any()) for place in latents]
    assert not any(needed[: start - halo])
    assert not any(needed[stop + halo :])
    assert needed[start - halo] or needed[stop + halo - 1]
    assert all(needed[start:stop])


@pytest.mark.parametrize("halo", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [20, 21, 33, 64])
def test_tiles_of_one_size_cover_a_side_once_with_their_halos(length: int, count: int, halo: int) -> None:
    found = spans(length, count=count, halo=halo)
    owners = np.zeros(length, int)
    for span in found:
        owners[span.own_start : span.own_stop] += 1
        assert span.start == 0 or span.own_start - span.start >= halo
        assert span.stop == length or span.stop - span.own_stop >= halo
    assert (owners == 1).all()
    assert len(found) == count
    assert {span.stop - span.start for span in found} == {tile_length(length, count=count, halo=halo)}


@pytest.mark.parametrize("count", [2, 3])
def test_each_pair_of_pixels_is_whole_in_the_tile_of_its_first(count: int) -> None:
    length, scale = 21, 8
    for span in spans(length, count=count, halo=3):
        kept, place = span.kept(scale, length=length)
        assert place == span.own_start * scale == span.start * scale + kept.start
        end = place + kept.stop - kept.start
        assert end == min(span.own_stop * scale + 1, length * scale)


@pytest.mark.parametrize("sides", [(48, 84), (68, 120), (30, 52), (84, 48), (20, 150)], ids=str)
@pytest.mark.parametrize("share", [1.1, 1.0, 0.99, 0.6, 0.4, 0.2, 0.0, -1.0])
def test_the_grid_is_the_one_that_decodes_least_of_those_that_fit(
    sides: tuple[int, int], share: float
) -> None:
    height, width = sides
    halo, most_area = 13, int(share * height * width)

    def area(grid: Grid) -> int:
        tile = tiles(height, width, grid=grid, halo=halo)[0]
        return (tile.rows.stop - tile.rows.start) * (tile.columns.stop - tile.columns.start)

    chosen = cheapest_grid(height, width, halo=halo, most_area=most_area)
    counts = product(range(1, max(2, height // halo + 1)), range(1, max(2, width // halo + 1)))
    grids = [Grid(*pair) for pair in counts]
    if share >= 1:
        assert chosen == WHOLE
    if area(chosen) <= most_area:
        work = area(chosen) * chosen.rows * chosen.columns
        for grid in grids:
            assert area(grid) > most_area or area(grid) * grid.rows * grid.columns >= work
    else:
        assert area(chosen) == min(map(area, grids)) > most_area
    assert area(chosen) * chosen.rows * chosen.columns < 9 * height * width


CASES = [  # latent frames and sides, and the grid
    ((1, 21, 2), Grid(2, 1)),
    ((2, 3, 23), Grid(1, 2)),
    ((3, 22, 3), Grid(2, 1)),
    ((1, 21, 22), Grid(2, 2)),
    ((1, 31, 21), Grid(3, 2)),
]


@pytest.mark.parametrize(("shape", "grid"), CASES, ids=str)
def test_a_clip_in_tiles_is_the_whole_clip(pair: Pair, shape: tuple[int, int, int], grid: Grid) -> None:
    latents = pair.latents(*shape)
    whole = pair.decoder.decode(latents, frames_at_once=1)
    pieces = list(pair.decoder.decode_pieces(latents, frames_at_once=2, grid=grid))
    assert len({(piece.top, piece.left) for piece in pieces}) == grid.rows * grid.columns
    assert whole.std() > 0.03
    for piece in pieces:  # the shared pixels as well
        _, num_frames, height, width = piece.rgb_3FHW.shape
        assert (piece.height, piece.width) == whole.shape[2:]
        frames = whole[:, piece.first_frame : piece.first_frame + num_frames]
        there = frames[:, :, piece.top : piece.top + height, piece.left : piece.left + width]
        assert (piece.rgb_3FHW - there).abs().max() < 1e-5
    tiled = joined(pieces)
    assert tiled.shape == whole.shape
    assert (tiled - whole).abs().max() < 1e-5
    levels = [(255 * rgb).round().int() for rgb in (tiled, whole)]
    assert (levels[0] - levels[1]).abs().max() <= 1


@pytest.mark.parametrize(("sides", "grid"), [((21, 4), Grid(2, 1)), ((4, 21), Grid(1, 2))], ids=str)
def test_a_halo_of_one_less_changes_pixels(
    sides: tuple[int, int], grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = make_vae("plain").double()  # so that what is compared is rounded once, at the end
    decoder = WanDecoder(vae)
    latents = rand(1, vae.config.z_dim, 2, *sides, seed=1).double() / 2
    whole = decoder.decode(latents, frames_at_once=1)
    assert (decoder.decode(latents, frames_at_once=1, grid=grid) - whole).abs().max() <= 2**-24
    monkeypatch.setattr(decoder, "_halo", decoder._halo - 1)
    assert (decoder.decode(latents, frames_at_once=1, grid=grid) - whole).abs().max() > 4 * 2**-24


def test_pixels_depend_on_the_latents_that_the_radii_say(pair: Pair) -> None:
    """Found with a value that spoils all that depends on it."""
    decoder = make_decoder(
        pair.kind, make_vae(pair.kind).double()
    )  # in fp64 no convolution mixes pixels on its own
    side, at = 2 * decoder._halo + 1, (decoder._halo, decoder._halo - 3)
    middle_THWC = rand(2, side, side, len(decoder._conv_in_weight), seed=1).double()
    middle_THWC[0, at[0], at[1], 0] = torch.nan
    decoder._memory.start(height=side, width=side, frames_at_once=1)
    with torch.inference_mode():
        rgb_3FHW = torch.cat([rgb for _, rgb in decoder._stream(partial(_part, middle_THWC), 2)], dim=1)
    spoilt_FHW = rgb_3FHW.isnan().any(dim=0)
    for axis, place in enumerate(at):
        found = spoilt_FHW.any(dim=2 - axis).numpy()
        expected = reached(np.arange(side) == place, decoder._radii(), cell=decoder._head.cell)
        assert not expected.all()
        assert (found == expected).all()


def test_the_halo_of_wan_follows_from_its_modules() -> None:
    for config, pixels, halo in ((WAN22, 16, 13), ({}, 8, 13), ({"num_res_blocks": 1}, 8, 9)):
        with torch.device("meta"):
            decoder = WanDecoder(AutoencoderKLWan(**config))
        assert (decoder._pixels, decoder._halo) == (pixels, halo)


def held_values(decoder: WanDecoder) -> int:
    memory = decoder._memory
    return memory._window.numel() + sum(conv.history_2HWC.numel() for conv in memory.convs)


def test_what_is_held_falls_with_the_area_of_a_tile_and_is_laid_out_once(pair: Pair) -> None:
    latents, grid = pair.latents(1, 25, 24), Grid(2, 2)
    for _ in pair.decoder.decode_pieces(latents, frames_at_once=1):
        pass
    whole = held_values(pair.decoder)
    addresses = set()
    for _ in pair.decoder.decode_pieces(latents, frames_at_once=1, grid=grid):
        addresses.add(pair.decoder._memory._window.data_ptr())
        assert held_values(pair.decoder) * 25 * 24 == whole * 22 * 21
    assert len(addresses) == 1


def test_a_clip_left_in_its_first_tile_does_not_influence_the_next(pair: Pair) -> None:
    first, second = (pair.latents(2, 21, 2, seed=seed) for seed in (1, 2))
    grid = Grid(2, 1)
    alone = pair.decoder.decode(second, frames_at_once=1, grid=grid)
    pieces = pair.decoder.decode_pieces(first, frames_at_once=1, grid=grid)
    for _ in range(3):
        next(pieces)
    assert torch.equal(pair.decoder.decode(second, frames_at_once=1, grid=grid), alone)
    with pytest.raises(AssertionError, match="another clip was begun"):
        next(pieces)


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_tiles_are_as_near_the_truth_as_diffusers(kind: str, device: str) -> None:
    pair = Pair(kind)
    latents = pair.latents(2, 22, 3).bfloat16()
    truth = diffusers_rgb(pair.vae.double(), latents)
    theirs, ours = (make_vae(kind).to(device, torch.bfloat16) for _ in range(2))
    allowed = diffusers_rgb(theirs, latents) - truth
    decoder = make_decoder(kind, ours)
    error = decoder.decode(latents.to(device), frames_at_once=1, grid=Grid(2, 1)).cpu() - truth
    assert error.square().mean().sqrt() <= 1.1 * allowed.square().mean().sqrt()


def wan_model(vae: object, *, frames_at_once: int | None = None) -> WanModel:
    return WanModel(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        experts=[],
        scheduler_config={},
        boundary_timestep=None,
        frames_at_once=frames_at_once,
    )


def test_how_a_clip_is_decoded_follows_from_its_shape_and_all_of_the_devices_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("meta"):
        vae = AutoencoderKLWan(**WAN22).bfloat16()
    model, by_frame = wan_model(vae), wan_model(vae, frames_at_once=1)

    def decoding(memory_gib: float, height: int, width: int, model: WanModel = model) -> tuple[int, Grid]:
        monkeypatch.setattr(wan, "device_memory_bytes", lambda device: int(memory_gib * GIB))
        return model._decoding(31, height // 16, width // 16)

    assert decoding(140, 768, 1344) == (4, WHOLE)
    assert decoding(24, 768, 1344) == (1, WHOLE)
    assert decoding(12, 768, 1344) == (1, Grid(1, 2))
    assert decoding(8, 768, 1344) == (1, Grid(1, 5))
    assert decoding(8, 480, 832) == (1, WHOLE)
    assert decoding(24, 1088, 1920) == (1, Grid(1, 2))
    assert decoding(1, 768, 1344) == (
        1,
        Grid(3, 6),
    )  # the smallest: what does not fit then runs out of memory
    assert decoding(1, 768, 1344, by_frame) == (1, WHOLE)


def test_a_tile_takes_what_the_device_may_give() -> None:
    with torch.device("meta"):
        decoder = WanDecoder(AutoencoderKLWan(**WAN22).bfloat16())
    for free_bytes in range(21 * 10**8, 60 * 10**8, 3 * 10**8):
        grid = decoder.grid(num_latents=31, height=48, width=84, free_bytes=free_bytes)
        sides = {
            name: tile_length(length, count=count, halo=13)
            for name, length, count in (("height", 48, grid.rows), ("width", 84, grid.columns))
        }
        kept_bytes = 31 * 48 * 84 * 1024 * 2 if grid != WHOLE else 0
        middle_bytes = decoder._middle_memory.needed_bytes(height=48, width=84, frames_at_once=1)
        tile_bytes = decoder._memory.needed_bytes(**sides, frames_at_once=1)
        assert kept_bytes + middle_bytes + tile_bytes <= free_bytes


@pytest.mark.parametrize("kind", ["t2v", "ti2v", "builtin"])
def test_a_job_renders_the_same_in_tiles(
    kind: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "builtin" if kind == "builtin" else str(build_checkpoint(tmp_path_factory.mktemp(kind), kind))
    model = resolve_model(folder)
    side = 320 if kind == "ti2v" else 160
    # Three and five pixels are cut off before the middle: tiles then end within a chroma sample.
    job: Job = make_job(model, width=side - 6, height=side - 10, num_frames=5, steps=1, guidance_scale=1.0)
    engine = make_engine(model)
    (whole,) = engine.render(make_batch(model, job)).clips
    tops: set[tuple[int, int]] = set()
    decode = WanModel.decode

    def seen(self: WanModel, latents: torch.Tensor) -> list[Piece]:
        pieces = list(decode(self, latents))
        tops.update((piece.top, piece.left) for piece in pieces)
        return pieces

    monkeypatch.setattr(WanModel, "decode", seen)
    monkeypatch.setattr(wan, "_WHOLE_FRAC", 0.0)
    (tiled,) = engine.render(make_batch(model, job)).clips
    assert len(tops) == 4
    assert whole.frames is not None
    assert tiled.frames is not None
    assert whole.frames.std() > 5
    assert np.abs(tiled.frames.astype(int) - whole.frames).max() <= 1
