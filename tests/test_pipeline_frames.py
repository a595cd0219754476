"""I420 bytes against values worked out by hand from BT.709."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.frames import FrameCollector, planes, to_frames, to_i420
from pipeline.models.protocol import Piece
from pipeline.models.wan_vae.tiles import Grid, tiles

DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]


def flat(red: float, green: float, blue: float, *, width: int = 8, height: int = 6) -> torch.Tensor:
    return torch.tensor([red, green, blue]).view(3, 1, 1, 1).expand(3, 2, height, width)


@pytest.mark.parametrize(
    ("rgb", "luma", "cb", "cr"),
    [
        ((0, 0, 0), 16, 128, 128),
        ((1, 1, 1), 235, 128, 128),
        ((0.5, 0.5, 0.5), 126, 128, 128),
        ((1, 0, 0), 63, 102, 240),
        ((0, 1, 0), 173, 42, 26),
        ((0, 0, 1), 32, 240, 118),
    ],
)
def test_flat_colours_have_their_bt709_limited_range_values(
    rgb: tuple[float, float, float], luma: int, cb: int, cr: int
) -> None:
    frames = to_i420(flat(*rgb)).numpy()
    assert frames.shape == (2, 9, 8)
    assert frames.dtype == np.uint8
    planes = frames.reshape(2, -1)
    assert (planes[:, :48] == luma).all()
    assert (planes[:, 48:60] == cb).all()
    assert (planes[:, 60:] == cr).all()


@pytest.mark.parametrize(("width", "height"), [(64, 64), (250, 130), (6, 10), (2, 2)])
def test_decoding_gives_the_colours_back(width: int, height: int) -> None:
    generator = torch.Generator().manual_seed(3)
    # The same colour in each 2x2 block: chroma loses nothing, so only rounding is left.
    blocks = torch.rand((3, 2, height // 2, width // 2), generator=generator)
    rgb = blocks.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    decoded = decode_i420(to_i420(rgb).numpy(), width=width, height=height)
    assert np.abs(decoded - 255 * rgb.numpy()).max() <= 3


def decode_i420(frames: np.ndarray, *, width: int, height: int) -> np.ndarray:
    flat_planes = frames.reshape(len(frames), -1).astype(float)
    num_pixels = width * height
    luma = flat_planes[:, :num_pixels].reshape(-1, height, width)
    chroma = flat_planes[:, num_pixels:].reshape(-1, 2, height // 2, width // 2)
    cb, cr = chroma.repeat(2, axis=2).repeat(2, axis=3).transpose(1, 0, 2, 3) - 128
    luma = 255 / 219 * (luma - 16)
    red = luma + 255 / 224 * 1.5748 * cr
    blue = luma + 255 / 224 * 1.8556 * cb
    green = (luma - 0.2126 * red - 0.0722 * blue) / 0.7152
    return np.stack([red, green, blue])


def test_chroma_is_the_mean_of_each_two_by_two_block() -> None:
    rgb = torch.zeros(3, 1, 2, 4)
    rgb[0, 0, 0, 0] = 1.0  # one red pixel of four
    planes = to_i420(rgb).numpy().reshape(-1)
    assert list(planes[8:]) == [128 - round(26 / 4), 128, 128 + 112 // 4, 128]


def test_an_odd_difference_in_size_loses_its_extra_row_at_the_far_side() -> None:
    rgb = torch.zeros(3, 4, 9, 13)
    rgb[:, :, 1:7, 2:10] = 1.0
    frames = to_frames(rgb, width=8, height=6, num_frames=3)
    assert frames.shape == (3, 9, 8)
    assert (frames[:, :6] == 235).all()


def test_the_tail_is_trimmed_not_the_head() -> None:
    rgb = torch.arange(4.0).div(4).view(1, 4, 1, 1).expand(3, 4, 4, 4)
    frames = to_frames(rgb, width=4, height=4, num_frames=2)
    assert frames[:, 0, 0].tolist() == [16, 71]


def test_half_precision_is_converted_in_full_precision() -> None:
    rgb = torch.rand((3, 2, 4, 4), generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(to_i420(rgb), to_i420(rgb.float()))


def test_a_size_larger_than_what_was_rendered_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        to_frames(flat(0, 0, 0), width=10, height=6, num_frames=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(1, 4, 4), (3, 3, 3), (9,), (2, 5, 1, 1)], ids=str)
def test_a_clip_in_pieces_is_the_clip(sizes: tuple[int, ...], device: str) -> None:
    rgb = torch.rand((3, 9, 10, 12), generator=torch.Generator().manual_seed(2)).to(device)
    collector = FrameCollector(width=8, height=6, num_frames=8, device=device)
    first_frame = 0
    for frames in rgb.split(sizes, dim=1):
        collector.add(Piece.of_whole(frames, first_frame=first_frame))
        first_frame += frames.shape[1]
    assert np.array_equal(collector.frames(), to_frames(rgb, width=8, height=6, num_frames=8))


def in_tiles(rgb: torch.Tensor, grid: Grid, *, scale: int) -> list[Piece]:
    """As a decoder that makes scale x scale pixels of a latent one cuts them, two frames at a time."""
    _, num_frames, height, width = rgb.shape
    rows, columns = height // scale, width // scale
    pieces = []
    for tile in tiles(rows, columns, grid=grid, halo=1):
        kept_rows, top = tile.rows.kept(scale, length=rows)
        kept_columns, left = tile.columns.kept(scale, length=columns)
        decoded = rgb[:, :, tile.rows.start * scale :, tile.columns.start * scale :]
        for first in range(0, num_frames, 2):
            piece = decoded[:, first : first + 2, kept_rows, kept_columns]
            pieces.append(
                Piece(rgb_3FHW=piece, first_frame=first, top=top, left=left, height=height, width=width)
            )
    return pieces


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(40, 32), (38, 30), (34, 26), (34, 30), (36, 22), (10, 6), (2, 2)], ids=str)
@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (1, 3), (2, 2), (3, 4)], ids=str)
def test_a_clip_in_tiles_is_the_clip(grid: tuple[int, int], size: tuple[int, int], device: str) -> None:
    """Cropped by odd numbers of pixels too, and where whole tiles are cropped away."""
    rgb = torch.rand((3, 5, 32, 40), generator=torch.Generator().manual_seed(2)).to(device)
    width, height = size
    collector = FrameCollector(width=width, height=height, num_frames=4, device=device)
    for piece in in_tiles(rgb, Grid(*grid), scale=4):
        collector.add(piece)
    assert np.array_equal(collector.frames(), to_frames(rgb, width=width, height=height, num_frames=4))


@pytest.mark.parametrize("missing", range(8))
def test_a_clip_without_one_of_its_pieces_is_a_bug(missing: int) -> None:
    collector = FrameCollector(width=38, height=26, num_frames=4, device="cpu")
    pieces = in_tiles(torch.zeros(3, 4, 32, 40), Grid(2, 2), scale=4)
    assert len(pieces) == 8
    for index, piece in enumerate(pieces):
        if index != missing:
            collector.add(piece)
    with pytest.raises(AssertionError):
        collector.frames()


def test_planes_are_views_of_the_frames() -> None:
    frames = np.arange(2 * 15 * 6, dtype=np.uint8).reshape(2, 15, 6)  # a height of 4k + 2
    luma, cb, cr = planes(frames)
    assert (luma.shape, cb.shape, cr.shape) == ((2, 10, 6), (2, 5, 3), (2, 5, 3))
    for frame in range(2):
        parts = [plane[frame].ravel() for plane in (luma, cb, cr)]
        assert np.array_equal(np.concatenate(parts), frames[frame].ravel())
    assert all(np.shares_memory(plane, frames) for plane in (luma, cb, cr))


def test_a_clip_with_too_few_frames_is_a_bug() -> None:
    collector = FrameCollector(width=8, height=6, num_frames=3, device="cpu")
    collector.add(Piece.of_whole(flat(0, 0, 0)))
    with pytest.raises(AssertionError):
        collector.frames()
