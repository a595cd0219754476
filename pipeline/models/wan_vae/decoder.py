"""From latents to RGB, piece by piece: what diffusers' AutoencoderKLWan.decode gives, up to rounding.

Shapes: C latent channels, T latent frames, H and W latent sides; F frames of pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch

from pipeline.models.wan_vae.blocks import MiddleBlock, UpBlock
from pipeline.models.wan_vae.causal import StreamMemory, channels_last, convolved
from pipeline.models.wan_vae.head import Head
from pipeline.models.wan_vae.sums import Pending, Sum, pointwise

# Six frames of history are moved for each piece of a layer, and three or four for each frame of the piece:
# with sixteen the history is a tenth of it all.
_MOST_FRAMES_AT_ONCE = 16


class WanDecoder:
    """The decoder of a loaded AutoencoderKLWan, on its device and in its dtype.

    Its convolutions' weights become channels-last where they lie; diffusers still runs on them. Only the
    folded upsampling kernels are new: 76 MB for Wan2.2 in bf16. A module that is moved or cast needs a new
    WanDecoder.

    No layer holds more than `frames_at_once` frames: layers before a doubling of time pass on what they make
    in pieces. Wan2.2 in bf16 at 1344x768 (latents of 48x84) takes 3.7 GB for what its convolutions remember
    and 0.5 for the two frames before a window, and 1.15 for each frame at once: 5.4 GB with one, 6.5 with
    two, 8.8 with four, 13.4 with eight. With its weights (1.4 GB) it stays below 8 GiB up to two. These are
    sums of the tensors alive, without what cuDNN takes to work. One clip is decoded at a time.
    """

    def __init__(self, vae: Any) -> None:
        decoder, is_residual = vae.decoder, vae.config.is_residual
        self._memory = StreamMemory()
        self._post_quant, self._conv_in = vae.post_quant_conv, decoder.conv_in
        self._conv_in_weight = channels_last(decoder.conv_in)
        self._middle = MiddleBlock(decoder.mid_block, memory=self._memory)
        *up_blocks, _ = decoder.up_blocks
        self._up_blocks = [
            UpBlock(block, is_residual=is_residual, scale=2**index, memory=self._memory)
            for index, block in enumerate(up_blocks)
        ]
        self._frames_per_latent = prod(block.upsampling.time_factor for block in self._up_blocks)
        self._head = Head(
            decoder, cell=vae.config.patch_size or 1, scale=2 ** len(up_blocks), memory=self._memory
        )
        self._num_clips = 0

    def frames_at_once(self, *, height: int, width: int, free_bytes: int) -> int:
        """The largest power of two that is sure to fit, and at least one. height, width: of the latents."""
        frames = _MOST_FRAMES_AT_ONCE
        while frames > 1 and not self._memory.fits(
            height=height, width=width, frames_at_once=frames, free_bytes=free_bytes
        ):
            frames //= 2
        return frames

    @torch.inference_mode()
    def decode_chunks(self, latents_1CTHW: torch.Tensor, *, frames_at_once: int) -> Iterator[torch.Tensor]:
        """fp32 RGB in [0, 1] of the clip's frames in order, (3, at most frames_at_once, height, width) each.

        latents: what AutoencoderKLWan.decode takes, so with its mean and deviation; in the decoder's dtype.
        Another call ends this one.
        """
        _, _, num_latents, height, width = latents_1CTHW.shape
        self._num_clips += 1
        clip = self._num_clips
        self._memory.start(height=height, width=width, frames_at_once=frames_at_once)
        padded_THWC = self._padded(latents_1CTHW)
        for start, stop in pieces(num_latents, frames_at_once):
            conv_in = convolved(padded_THWC[start : stop + 2], self._conv_in_weight)
            total = self._middle(Sum(conv_in, self._conv_in.bias))
            for rgb_3FHW in self._pictures(total, self._up_blocks, is_first=start == 0):
                yield rgb_3FHW
                assert clip == self._num_clips, "another clip was begun before this one's end"

    @torch.inference_mode()
    def decode(self, latents_1CTHW: torch.Tensor, *, frames_at_once: int) -> torch.Tensor:
        """The whole clip of decode_chunks: (3, F, height, width)."""
        chunks = self.decode_chunks(latents_1CTHW, frames_at_once=frames_at_once)
        first_3FHW = next(chunks)
        num_frames = 1 + (latents_1CTHW.shape[2] - 1) * self._frames_per_latent
        clip_3FHW = first_3FHW.new_empty(3, num_frames, *first_3FHW.shape[2:])
        start = 0
        for chunk_3FHW in chain([first_3FHW], chunks):
            clip_3FHW[:, start : start + chunk_3FHW.shape[1]] = chunk_3FHW
            start += chunk_3FHW.shape[1]
        return clip_3FHW

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


def pieces(num_latents: int, frames_at_once: int) -> Iterator[tuple[int, int]]:
    """The first latent frame alone, as it is not upsampled in time, then up to frames_at_once together."""
    yield 0, 1
    for start in range(1, num_latents, frames_at_once):
        yield start, min(start + frames_at_once, num_latents)
