"""What an engine asks of a family of models; one adapter for each family implements it.

Shapes: B clips, C latent channels, T latent frames, H and W latent sides (of pictures, where there are F
frames), L text tokens, E channels of the text encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipeline.config import LoraSource


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some frames of a clip, or of a tile of its pictures: fp32 RGB in [0, 1], and where it belongs.

    first_frame: of the clip. top, left: of its first pixel, in pictures of height x width.
    """

    rgb_3FHW: torch.Tensor
    first_frame: int
    top: int
    left: int
    height: int
    width: int

    @classmethod
    def of_whole(cls, rgb_3FHW: torch.Tensor, *, first_frame: int = 0) -> Piece:
        """Whole pictures."""
        _, _, height, width = rgb_3FHW.shape
        return cls(rgb_3FHW=rgb_3FHW, first_frame=first_frame, top=0, left=0, height=height, width=width)


class SparseAttention(Protocol):
    """What a forward is given where not every token attends to every other.

    least_tokens: of a clip; with fewer a forward stays dense. dense_blocks: so many of the transformer, from
    its first on, are dense anyway.
    """

    @property
    def least_tokens(self) -> int: ...

    @property
    def dense_blocks(self) -> int: ...

    def order(self, grid: Sequence[int]) -> torch.Tensor:
        """The tokens of a clip, (N,) on the CPU, as they follow one another in all blocks.

        grid: how many in time, height and width, numbered row by row.
        """

    def __call__(self, q_BNHK: torch.Tensor, k_BNHK: torch.Tensor, v_BNHK: torch.Tensor) -> torch.Tensor:
        """(B, N, H * K). All three are views of one fused projection, tokens in that order."""


class Denoiser(Protocol):
    """A model with all that does not change from step to step computed once.

    sparse: for this step's self-attention, where it is not dense.
    """

    def __call__(
        self,
        latents_BCTHW: torch.Tensor,
        *,
        index: int,
        guidance_scale: float,
        sparse: SparseAttention | None = None,
    ) -> torch.Tensor:
        """The guided velocity in fp32, of the latents' shape. index: of one of the denoiser's own steps."""

    def branches(
        self,
        latents_BCTHW: torch.Tensor,
        *,
        index: int,
        is_guided: bool,
        sparse: SparseAttention | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """What it is made of, for those who reuse parts of it: the prompt's velocity and, where guided, the
        negative prompt's, in fp32, the caller's to keep."""


class VideoModel(Protocol):
    """A loaded model on its device. scheduler_config: of the sampler it was published with.

    boundary_timestep: below it the second expert takes over; None for models with one.
    """

    scheduler_config: Mapping[str, Any]
    boundary_timestep: float | None

    def encode(self, prompts: Sequence[str]) -> list[torch.Tensor]:
        """Each prompt's own tokens, unpadded (L, E), on the CPU: independent of every other prompt."""

    def latent_shape(self, *, width: int, height: int, num_frames: int) -> tuple[int, int, int, int]:
        """(C, T, H, W) of a clip of that size in pixels and frames, which the model must allow."""

    def denoiser(
        self,
        prompts: Sequence[torch.Tensor],
        negatives: Sequence[torch.Tensor],
        *,
        timesteps: torch.Tensor,
        expert: int,
    ) -> Denoiser:
        """One expert made ready for a batch's encoded prompts and its own steps of the schedule, (S,).

        negatives: none where nothing is guided. The denoiser is used before another one is asked for.
        """

    def use_loras(self, loras: Sequence[LoraSource]) -> bool:
        """Put these into the weights, and no others any more; False where the model must be loaded anew."""

    def lay_out(self, shape_CTHW: tuple[int, int, int, int]) -> None:
        """Make room for what decoding clips of these latents keeps from clip to clip.

        Before a bucket's first step, so that nothing lasting comes to lie where steps had their temporaries:
        the next batch then asks the device for no more memory than the first one had.
        """

    def decode(self, latents_1CTHW: torch.Tensor) -> Iterator[Piece]:
        """One clip in pieces that together are all of it; one clip at a time.

        A tile also has the first row of pixels below it and the first column to its right: so each square of
        2x2 pixels, wherever it lies, is whole in the tile that its first pixel is of.
        """


def joined(pieces: Sequence[Piece]) -> torch.Tensor:
    """The clip, (3, F, height, width), of all its pieces."""
    last = max(pieces, key=lambda piece: piece.first_frame)
    num_frames = last.first_frame + last.rgb_3FHW.shape[1]
    clip_3FHW = last.rgb_3FHW.new_empty(3, num_frames, last.height, last.width)
    for piece in pieces:
        _, frames, height, width = piece.rgb_3FHW.shape
        clip_3FHW[
            :,
            piece.first_frame : piece.first_frame + frames,
            piece.top : piece.top + height,
            piece.left : piece.left + width,
        ] = piece.rgb_3FHW
    return clip_3FHW
