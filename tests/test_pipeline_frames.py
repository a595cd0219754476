"""I420 bytes against values worked out by hand from BT.709."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.frames import FrameCollector, to_frames, to_i420


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


@pytest.mark.parametrize("device", ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("sizes", [(1, 4, 4), (3, 3, 3), (9,), (2, 5, 1, 1)], ids=str)
def test_a_clip_in_pieces_is_the_clip(sizes: tuple[int, ...], device: str) -> None:
    rgb = torch.rand((3, 9, 10, 12), generator=torch.Generator().manual_seed(2)).to(device)
    collector = FrameCollector(width=8, height=6, num_frames=8, device=device)
    for piece in rgb.split(sizes, dim=1):
        collector.add(piece)
    assert np.array_equal(collector.frames(), to_frames(rgb, width=8, height=6, num_frames=8))


def test_a_clip_with_too_few_frames_is_a_bug() -> None:
    collector = FrameCollector(width=8, height=6, num_frames=3, device="cpu")
    collector.add(flat(0, 0, 0))
    with pytest.raises(AssertionError):
        collector.frames()
