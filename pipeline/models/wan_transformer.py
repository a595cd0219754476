"""Our forward of Wan's transformer over the weights of a diffusers module, none of which it holds twice.

All prompts of a step go through one call: until a prompt is first looked at, in the first block's
cross-attention, guidance's two branches are one and are computed once.

Shapes: B clips, C latent channels, T latent frames, N tokens, M rows of text, L blocks, D channels,
H heads of K channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pipeline.graph.fold import StepTables, step_tables
from pipeline.kernels.attention import TORCH
from pipeline.kernels.qk_norm_rope import Rope
from pipeline.memory.streaming import StreamedLayers
from pipeline.models.protocol import SparseAttention
from pipeline.models.wan_block import Attending, Norm, TextKeys, WanBlock, first_norm, wan_block

# Which attention library computes self-attention of (B, N, H, K) queries.
BackendOf = Callable[[tuple[int, int, int, int]], str]
Convert = Callable[[int, WanBlock], WanBlock]


class _Layout(NamedTuple):
    """Of tokens in an order of their own: their numbers in the grid, and the place of each number in it."""

    rope: Rope
    order_N: torch.Tensor
    places_N: torch.Tensor


def torch_attention(shape_BNHK: tuple[int, int, int, int]) -> str:
    return TORCH


class WanTransformer:
    """module: a diffusers WanTransformer3DModel for text-to-video, on its device in its dtype.

    convert: makes another block of each, by its number, as approx/fp8.py does. The module's own go as soon as
    they are converted, and it can compute no more.
    streamed_to: for a module on the CPU that is too large for this device. Its blocks then wait in host
    memory and come one by one; all else moves there, and the module itself can compute no more.
    """

    def __init__(
        self,
        module: Any,
        *,
        backend_of: BackendOf = torch_attention,
        convert: Convert | None = None,
        streamed_to: str | None = None,
    ) -> None:
        self.module = module
        self.num_heads = int(module.config.num_attention_heads)
        self.eps = float(module.config.eps)
        self.patch = tuple(int(side) for side in module.config.patch_size)
        self.dtype: torch.dtype = module.patch_embedding.weight.dtype
        self._tables_16D = [block.scale_shift_table for block in module.blocks]
        self.blocks: Sequence[WanBlock] = self._blocks(convert)
        self._forms = [block.self_attention.form for block in self.blocks]
        if streamed_to is not None:
            assert len(set(self._forms)) == 1, (
                "streamed blocks take each other's room, so all are of one kind"
            )
            self.blocks = StreamedLayers(self.blocks, device=streamed_to)
            module.blocks = torch.nn.ModuleList()
            module.to(streamed_to)
            self._tables_16D = [table_16D.to(streamed_to) for table_16D in self._tables_16D]
        self._backend_of = backend_of
        self._rope: dict[torch.Size, Rope] = {}
        self._layouts: dict[torch.Size, _Layout] = {}

    def text_keys(
        self, text_BME: torch.Tensor, counts_B: torch.Tensor, *, into: Sequence[TextKeys] = ()
    ) -> list[TextKeys]:
        """Cross-attention keys and values of every block: the same at every step, so computed once a batch.

        text_BME: the text encoder's output, of which row b has counts_B[b] tokens and zeros after them.
        into: an earlier result for as many rows, which becomes this one.
        """
        text_BMD = self.module.condition_embedder.text_embedder(text_BME.to(self.dtype))
        # Room for all before the first is computed: a later batch, which has it, then allocates no more.
        kept = list(into) or [TextKeys.room_for(text_BMD, num_heads=self.num_heads) for _ in self.blocks]
        for keys, block in zip(kept, self.blocks, strict=True):
            keys.copy_(block.text_keys(text_BMD, counts_B))
        return kept

    def step_tables(self, timesteps_S: torch.Tensor) -> StepTables:
        """What each timestep means to every block, for a whole schedule."""
        return step_tables(self.module, torch.cat(self._tables_16D).float(), timesteps_S)

    def __call__(
        self,
        latents_BCTHW: torch.Tensor,
        *,
        blocks_L6D: torch.Tensor,
        head_2D: torch.Tensor,
        texts: Sequence[Sequence[TextKeys]],
        sparse: SparseAttention | None = None,
    ) -> list[torch.Tensor]:
        """The velocity at `latents` for each of the texts, in the module's dtype.

        blocks_L6D, head_2D: one step's rows of `step_tables`. sparse: how tokens attend to each other, but in
        its dense blocks.
        """
        rope = self._rope_tables(latents_BCTHW)
        x_BND = self._patch_embed(latents_BCTHW)
        layout = None if sparse is None else self._layout(latents_BCTHW.shape, rope, sparse)
        if layout is not None:
            rope, x_BND = layout.rope, x_BND[:, layout.order_N]
        backend = self._backend_of((*x_BND.shape[:2], self.num_heads, x_BND.shape[2] // self.num_heads))
        dense = Attending(rope=rope, backend=backend)
        sparsely = Attending(rope=rope, backend=backend, sparse=sparse)
        num_dense = len(self.blocks) if sparse is None else sparse.dense_blocks
        norms = [*map(first_norm, blocks_L6D, self._forms), Norm(weight=head_2D[1], bias=head_2D[0])]
        streams = [x_BND]
        normed = [norms[0].of(x_BND, eps=self.eps)]
        for number, (block, table_6D) in enumerate(zip(self.blocks, blocks_L6D, strict=True)):
            attending = dense if number < num_dense else sparsely
            for stream_BND in streams:
                normed.append(block.attend(stream_BND, normed, table_6D, attending))
            if number == 0:
                streams += [x_BND.clone() for _ in texts[1:]]
                normed *= len(texts)
            for stream_BND, text in zip(streams, texts, strict=True):
                normed.append(block.finish(stream_BND, normed, table_6D, text[number], norms[number + 1]))
        velocities = (self.module.proj_out(normed_BND) for normed_BND in normed)
        if layout is not None:
            velocities = (velocity_BNP[:, layout.places_N] for velocity_BNP in velocities)
        return [self._unpatchify(velocity_BNP, latents_BCTHW.shape) for velocity_BNP in velocities]

    def num_tokens(self, latent_shape: torch.Size) -> int:
        """Of a whole batch of latents (B, C, T, H, W)."""
        return math.prod((latent_shape[0], *latent_shape[2:])) // math.prod(self.patch)

    def _blocks(self, convert: Convert | None) -> list[WanBlock]:
        blocks = []
        for number, module in enumerate(self.module.blocks):
            block = wan_block(module, num_heads=self.num_heads, eps=self.eps)
            if convert is not None:
                block = convert(number, block)
                self.module.blocks[number] = torch.nn.Identity()
            blocks.append(block)
        if convert is not None:
            self.module.blocks = torch.nn.ModuleList()
        return blocks

    def _patch_embed(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        embedding = self.module.patch_embedding
        batch, channels, *sides = latents_BCTHW.shape
        grid = [(side // patch, patch) for side, patch in zip(sides, self.patch, strict=True)]
        cells = latents_BCTHW.to(self.dtype).reshape(batch, channels, *(n for pair in grid for n in pair))
        patches = cells.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)  # channel, pt, ph, pw
        return F.linear(patches, embedding.weight.flatten(1), embedding.bias)

    def _rope_tables(self, latents_BCTHW: torch.Tensor) -> Rope:
        shape = latents_BCTHW.shape[2:]
        if shape not in self._rope:
            cos_1N1K, sin_1N1K = self.module.rope(latents_BCTHW)
            # diffusers keeps each angle twice, once for each channel of its pair.
            self._rope = {shape: (cos_1N1K[0, ..., 0::2].contiguous(), sin_1N1K[0, ..., 1::2].contiguous())}
        return self._rope[shape]

    def _layout(self, latent_shape: torch.Size, rope: Rope, sparse: SparseAttention) -> _Layout:
        shape = latent_shape[2:]
        if shape not in self._layouts:
            grid = [side // patch for side, patch in zip(shape, self.patch, strict=True)]
            order_N = sparse.order(grid).to(rope[0].device)
            cos_N1R, sin_N1R = (table_N1R[order_N] for table_N1R in rope)
            self._layouts = {shape: _Layout((cos_N1R, sin_N1R), order_N, order_N.argsort())}
        return self._layouts[shape]

    def _unpatchify(self, x_BNP: torch.Tensor, latent_shape: torch.Size) -> torch.Tensor:
        batch, _, *sides = latent_shape
        grid = [side // patch for side, patch in zip(sides, self.patch, strict=True)]
        cells = x_BNP.reshape(batch, *grid, *self.patch, -1)  # batch, t, h, w, pt, ph, pw, channel
        return cells.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(batch, -1, *sides)
