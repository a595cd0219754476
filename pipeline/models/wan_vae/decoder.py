"""From latents to RGB, piece by piece: what diffusers' AutoencoderKLWan.decode gives, up to rounding.

Shapes: C latent channels, T latent frames, H and W latent sides; F frames of pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from pipeline.models.protocol import Piece, joined
from pipeline.models.wan_vae.blocks import MiddleBlock, UpBlock
from pipeline.models.wan_vae.causal import MakeConv, StreamMemory, channels_last, convolved, plain_conv
from pipeline.models.wan_vae.filling import filled
from pipeline.models.wan_vae.head import Head
from pipeline.models.wan_vae.sums import Pending, Sum, pointwise
from pipeline.models.wan_vae.tiles import WHOLE, Grid, cheapest_grid, halo_width, tile_length, tiles

# Six frames of history are moved for each piece of a layer, and three or four for each frame of the piece:
# with sixteen the history is a tenth of it all.
_MOST_FRAMES_AT_ONCE = 16


class WanDecoder:
    """The decoder of a loaded AutoencoderKLWan, on its device and in its dtype.

    Its convolutions' weights become channels-last where they lie; diffusers still runs on them. Only the
    folded upsampling kernels are new, 76 MB for Wan2.2 in bf16, and what is filled up. A module that is moved
    or cast needs a new WanDecoder.

    No layer holds more than `frames_at_once` frames: layers before a doubling of time pass on what they make
    in pieces. Wan2.2 in bf16 at 1344x768 (latents of 48x84) takes 3.7 GB for what its convolutions remember
    and 0.5 for the two frames before a window, and 1.15 for each frame at once: 5.4 GB with one, 6.5 with
    two, 8.8 with four, 13.4 with eight. With its weights (1.4 GB) it stays below 8 GiB up to two. These are
    sums of the tensors alive, without what cuDNN takes to work. One clip is decoded at a time.

    Where one frame is too much there are tiles, see tiles.py. They begin after the middle block, whose
    attention sees whole frames: its result for all of the clip is kept, 0.26 GB for 121 of those frames, and
    each tile streams through time for itself.

    make_conv: for residual blocks, as approx/fp8_decoder.py does.
    """

    def __init__(self, vae: Any, *, make_conv: MakeConv = plain_conv) -> None:
        decoder, is_residual = filled(vae.decoder), vae.config.is_residual
        self._middle_memory, self._memory = StreamMemory(), StreamMemory()
        self._post_quant, self._conv_in = vae.post_quant_conv, decoder.conv_in
        self._conv_in_weight = channels_last(decoder.conv_in)
        self._middle = MiddleBlock(decoder.mid_block, memory=self._middle_memory, make_conv=make_conv)
        *up_blocks, _ = decoder.up_blocks
        self._up_blocks = [
            UpBlock(block, is_residual=is_residual, scale=2**index, memory=self._memory, make_conv=make_conv)
            for index, block in enumerate(up_blocks)
        ]
        cell, scale = vae.config.patch_size or 1, 2 ** len(up_blocks)
        self._head = Head(decoder, cell=cell, scale=scale, memory=self._memory, make_conv=make_conv)
        self._pixels = scale * cell  # to a side of a latent one
        self._halo = halo_width(self._radii(), cell=cell)
        self._num_clips = 0

    def frames_at_once(self, *, height: int, width: int, free_bytes: int) -> int:
        """The largest power of two that is sure to fit, and at least one. height, width: of the latents."""
        frames = _MOST_FRAMES_AT_ONCE
        while frames > 1 and not (
            self._memory.is_within_32_bits(height=height, width=width, frames_at_once=frames)
            and self._needed_bytes(height, width, frames_at_once=frames) <= free_bytes
        ):
            frames //= 2
        return frames

    def grid(self, *, num_latents: int, height: int, width: int, free_bytes: int) -> Grid:
        """The cheapest that fits, of a frame at a time; where none does, the one of the smallest tiles.

        num_latents, height, width: of the latents.
        """
        if self._needed_bytes(height, width, frames_at_once=1) <= free_bytes:
            return WHOLE
        like = self._conv_in_weight
        kept_bytes = num_latents * height * width * len(like) * like.element_size()
        middle_bytes = self._middle_memory.needed_bytes(height=height, width=width, frames_at_once=1)
        bytes_for_each_pixel = self._memory.needed_bytes(height=1, width=1, frames_at_once=1)
        most_area = (free_bytes - kept_bytes - middle_bytes) // bytes_for_each_pixel
        return cheapest_grid(height, width, halo=self._halo, most_area=most_area)

    @torch.inference_mode()
    def decode_pieces(
        self, latents_1CTHW: torch.Tensor, *, frames_at_once: int, grid: Grid = WHOLE
    ) -> Iterator[Piece]:
        """The clip's pieces, tile by tile and each tile's in order, of at most frames_at_once frames.

        latents: what AutoencoderKLWan.decode takes, so with its mean and deviation; in the decoder's dtype.
        Another call ends this one.
        """
        self._num_clips += 1
        clip = self._num_clips
        make = self._whole if grid == WHOLE else partial(self._in_tiles, grid=grid)
        for piece in make(latents_1CTHW, frames_at_once=frames_at_once):
            yield piece
            assert clip == self._num_clips, "another clip was begun before this one's end"

    def lay_out(self, *, height: int, width: int, frames_at_once: int, grid: Grid = WHOLE) -> None:
        """Make room for what decoding keeps from piece to piece. height, width: of the latents.

        decode_pieces does it too, where it was not done; what another shape left is given back first.
        """
        self._lay_out_pieces(height, width, frames_at_once, grid)
        self._middle_memory.start(height=height, width=width, frames_at_once=frames_at_once)

    def _lay_out_pieces(self, height: int, width: int, frames_at_once: int, grid: Grid) -> None:
        self._memory.start(
            height=tile_length(height, count=grid.rows, halo=self._halo),
            width=tile_length(width, count=grid.columns, halo=self._halo),
            frames_at_once=frames_at_once,
        )

    def decode(self, latents_1CTHW: torch.Tensor, *, frames_at_once: int, grid: Grid = WHOLE) -> torch.Tensor:
        """The whole clip of decode_pieces: (3, F, height, width)."""
        return joined(list(self.decode_pieces(latents_1CTHW, frames_at_once=frames_at_once, grid=grid)))

    def _whole(self, latents_1CTHW: torch.Tensor, *, frames_at_once: int) -> Iterator[Piece]:
        *_, num_latents, height, width = latents_1CTHW.shape
        middle = self._middle_of(latents_1CTHW, frames_at_once=frames_at_once)
        self._lay_out_pieces(height, width, frames_at_once, WHOLE)
        for first_frame, rgb_3FHW in self._stream(middle, num_latents):
            yield Piece.of_whole(rgb_3FHW, first_frame=first_frame)

    def _in_tiles(self, latents_1CTHW: torch.Tensor, *, frames_at_once: int, grid: Grid) -> Iterator[Piece]:
        *_, num_latents, height, width = latents_1CTHW.shape
        restart = partial(self._lay_out_pieces, height, width, frames_at_once, grid)
        restart()  # at once, so that what a larger clip left is gone before the middle block's result comes
        middle_THWC = self._whole_middle(latents_1CTHW, frames_at_once=frames_at_once)
        for tile in tiles(height, width, grid=grid, halo=self._halo):
            restart()
            seen_THWC = middle_THWC[:, tile.rows.decoded, tile.columns.decoded]
            rows, top = tile.rows.kept(self._pixels, length=height)
            columns, left = tile.columns.kept(self._pixels, length=width)
            for first_frame, rgb_3FHW in self._stream(partial(_part, seen_THWC), num_latents):
                yield Piece(
                    rgb_3FHW=rgb_3FHW[:, :, rows, columns],
                    first_frame=first_frame,
                    top=top,
                    left=left,
                    height=height * self._pixels,
                    width=width * self._pixels,
                )

    def _stream(
        self, middle: Callable[[int, int], Sum], num_latents: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Pictures, and the number of the first of them. middle: its result for latents start to stop."""
        first_frame = 0
        for start, stop in pieces(num_latents, self._memory.frames_at_once):
            for rgb_3FHW in self._pictures(middle(start, stop), self._up_blocks, is_first=start == 0):
                yield first_frame, rgb_3FHW
                first_frame += rgb_3FHW.shape[1]

    def _middle_of(self, latents_1CTHW: torch.Tensor, *, frames_at_once: int) -> Callable[[int, int], Sum]:
        """The decoder up to its middle block, which takes the clip's latents in order, from start to stop."""
        *_, height, width = latents_1CTHW.shape
        padded_THWC = self._padded(latents_1CTHW)
        self._middle_memory.start(height=height, width=width, frames_at_once=frames_at_once)

        def middle(start: int, stop: int) -> Sum:
            conv_in = convolved(padded_THWC[start : stop + 2], self._conv_in_weight)
            return self._middle(Sum(conv_in, self._conv_in.bias))

        return middle

    def _whole_middle(self, latents_1CTHW: torch.Tensor, *, frames_at_once: int) -> torch.Tensor:
        """The middle block's result for all of the clip: (T, H, W, channels)."""
        *_, num_latents, height, width = latents_1CTHW.shape
        middle = self._middle_of(latents_1CTHW, frames_at_once=frames_at_once)
        like = self._conv_in_weight
        middle_THWC = like.new_empty(num_latents, height, width, len(like))
        for start, stop in pieces(num_latents, frames_at_once):
            middle(start, stop).total(middle_THWC[start:stop])
        return middle_THWC

    def _padded(self, latents_1CTHW: torch.Tensor) -> torch.Tensor:
        """The decoder's input, behind two frames of zeros: (T + 2, H, W, C)."""
        latents_THWC = latents_1CTHW[0].permute(1, 2, 3, 0).contiguous()
        padded_THWC = latents_THWC.new_zeros(len(latents_THWC) + 2, *latents_THWC.shape[1:])
        padded_THWC[2:] = pointwise(latents_THWC, self._post_quant.weight, self._post_quant.bias)
        return padded_THWC

    def _pictures(
        self, pending: Pending, blocks: Sequence[UpBlock], *, is_first: bool
    ) -> Iterator[torch.Tensor]:
        """Depth first: a piece becomes pictures before the block that made it makes the next."""
        if not blocks:
            yield self._head(pending)
            return
        frames_at_once = self._memory.frames_at_once
        for piece in blocks[0](pending, is_first=is_first, frames_at_once=frames_at_once):
            yield from self._pictures(piece, blocks[1:], is_first=is_first)

    def _radii(self) -> list[int]:
        """Of all convolutions after the middle block, added up at each size, the latents' first."""
        radii = [0] * (len(self._up_blocks) + 1)
        for conv in self._memory.convs:
            radii[conv.scale.bit_length() - 1] += conv.radius
        for index, block in enumerate(self._up_blocks):
            radii[index + 1] += block.upsampling.radius
        return radii

    def _needed_bytes(self, height: int, width: int, *, frames_at_once: int) -> int:
        return sum(
            memory.needed_bytes(height=height, width=width, frames_at_once=frames_at_once)
            for memory in (self._middle_memory, self._memory)
        )


def _part(middle_THWC: torch.Tensor, start: int, stop: int) -> Sum:
    """Some frames, copied, as what reads a sum writes over it."""
    part_THWC = middle_THWC[start:stop].clone(memory_format=torch.contiguous_format)
    return Sum(part_THWC, bias_C=part_THWC.new_zeros(part_THWC.shape[-1]))


def pieces(num_latents: int, frames_at_once: int) -> Iterator[tuple[int, int]]:
    """The first latent frame alone, as it is not upsampled in time, then up to frames_at_once together."""
    yield 0, 1
    for start in range(1, num_latents, frames_at_once):
        yield start, min(start + frames_at_once, num_latents)
