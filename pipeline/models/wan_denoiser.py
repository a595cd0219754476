"""One expert at work on one bucket: batches of prompts come and go, buffers and recorded kernels stay.

Shapes: B clips, C latent channels, T latent frames, H and W latent sides, N tokens, S steps, L blocks,
M rows of text, E text channels, D channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from pipeline.graph.fold import StepTables
from pipeline.graph.recorded import Recorded
from pipeline.models.protocol import SparseAttention
from pipeline.models.wan_block import TextKeys
from pipeline.models.wan_transformer import WanTransformer
from pipeline.sampling.guidance import guided

PaddedTexts = tuple[torch.Tensor, torch.Tensor]  # text_BME, counts_B, as WanTransformer.text_keys takes them

# Below it a forward is bound by what the CPU can launch: 5,070 tokens keep an H200 busy for 130 ms, 320
# tokens leave it idle for most of 33.
RECORDED_TOKENS = 8_192


class WanDenoiser:
    """A Denoiser. Bind it to a batch first; binding it to one of other shapes starts anew."""

    def __init__(self, expert: WanTransformer) -> None:
        self._expert = expert
        self._texts: list[list[TextKeys]] = []
        self._tables: StepTables | None = None
        self._latent_shape: torch.Size | None = None
        self._forwards: dict[int, Recorded] = {}

    def bind(self, texts: Sequence[PaddedTexts], *, timesteps_S: torch.Tensor) -> None:
        """texts: the prompts', and the negative prompts' where there is guidance. timesteps: of all steps."""
        kept = [text[0].k_BMHK.shape[:2] for text in self._texts]
        if [text_BME.shape[:2] for text_BME, _ in texts] != kept:
            self._texts.clear()
            self._forwards.clear()
        into = self._texts or [[] for _ in texts]
        self._texts = [
            self._expert.text_keys(*text, into=keys) for text, keys in zip(texts, into, strict=True)
        ]
        self._tables = None  # the last batch's make room first
        self._tables = self._expert.step_tables(timesteps_S)

    def __call__(
        self,
        latents_BCTHW: torch.Tensor,
        *,
        index: int,
        guidance_scale: float,
        sparse: SparseAttention | None = None,
    ) -> torch.Tensor:
        num_texts = 1 if guidance_scale == 1.0 else 2
        velocities = self._velocities(latents_BCTHW, index, num_texts=num_texts, sparse=sparse)
        if len(velocities) == 1:
            return velocities[0].to(torch.float32, copy=True)  # a recorded forward writes there again
        conditional, unconditional = (velocity.float() for velocity in velocities)
        return guided(conditional, unconditional, scale=guidance_scale)

    def branches(
        self,
        latents_BCTHW: torch.Tensor,
        *,
        index: int,
        is_guided: bool,
        sparse: SparseAttention | None = None,
    ) -> tuple[torch.Tensor, ...]:
        num_texts = 2 if is_guided else 1
        velocities = self._velocities(latents_BCTHW, index, num_texts=num_texts, sparse=sparse)
        return tuple(velocity.to(torch.float32, copy=True) for velocity in velocities)

    def _velocities(
        self, latents_BCTHW: torch.Tensor, index: int, *, num_texts: int, sparse: SparseAttention | None
    ) -> tuple[torch.Tensor, ...]:
        assert self._tables is not None
        inputs = (latents_BCTHW, self._tables.blocks_SL6D[index], self._tables.head_S2D[index])
        if sparse is None or self._expert.num_tokens(latents_BCTHW[:1].shape) < sparse.least_tokens:
            return self._recorded(num_texts, latents_BCTHW)(*inputs)
        return self._forward(*inputs, num_texts=num_texts, sparse=sparse)

    def _forward(
        self,
        latents_BCTHW: torch.Tensor,
        blocks_L6D: torch.Tensor,
        head_2D: torch.Tensor,
        *,
        num_texts: int,
        sparse: SparseAttention | None = None,
    ) -> tuple[torch.Tensor, ...]:
        texts = self._texts[:num_texts]
        velocities = self._expert(
            latents_BCTHW, blocks_L6D=blocks_L6D, head_2D=head_2D, texts=texts, sparse=sparse
        )
        return tuple(velocities)

    def _recorded(self, num_texts: int, latents_BCTHW: torch.Tensor) -> Recorded:
        """Of dense forwards alone: sparse ones are for clips that keep a card busy."""
        if latents_BCTHW.shape != self._latent_shape:  # another bucket: the last one's recordings hold memory
            self._forwards.clear()
            self._latent_shape = latents_BCTHW.shape
        if num_texts not in self._forwards:
            is_small = self._expert.num_tokens(latents_BCTHW.shape) <= RECORDED_TOKENS
            self._forwards[num_texts] = Recorded(
                partial(self._forward, num_texts=num_texts), enabled=is_small and latents_BCTHW.is_cuda
            )
        return self._forwards[num_texts]
