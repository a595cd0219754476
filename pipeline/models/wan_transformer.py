"""Our forward of Wan's transformer over the weights of a diffusers module; it holds no weights itself.

One timestep for the whole batch, given once: text-to-video never needs the per-token table that Wan2.2-TI2V's
pipeline expands it to, and a modulation row computed once is exact.

Shapes: B clips, C latent channels, T latent frames, N tokens, L text tokens, D channels,
H heads of K channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from pipeline.kernels.affine_norm import affine_norm
from pipeline.kernels.attention import attention
from pipeline.kernels.gated_residual import gated_residual
from pipeline.kernels.gelu import gelu
from pipeline.kernels.qk_norm_rope import Rope, qk_norm, qk_norm_rope

TextStates = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each block, (B, L, H, K)


class WanTransformer:
    """module: a diffusers WanTransformer3DModel for text-to-video, on its device in its dtype."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.num_heads = int(module.config.num_attention_heads)
        self.eps = float(module.config.eps)
        self.patch = tuple(int(side) for side in module.config.patch_size)
        self.dtype: torch.dtype = module.patch_embedding.weight.dtype
        self._rope: dict[torch.Size, Rope] = {}

    def text_states(self, text_BLE: torch.Tensor) -> TextStates:
        """Cross-attention keys and values of every block: the same at every step, so computed once a batch.

        text_BLE: the text encoder's output, zero past each prompt's end.
        """
        text_BLD = self.module.condition_embedder.text_embedder(text_BLE.to(self.dtype))
        return [self._text_state(block.attn2, text_BLD) for block in self.module.blocks]

    def __call__(
        self, latents_BCTHW: torch.Tensor, *, timestep: torch.Tensor, text_states: TextStates
    ) -> torch.Tensor:
        """The velocity at `latents`, of their shape, in the module's dtype. timestep: a scalar."""
        x_BND = self._patch_embed(latents_BCTHW)
        rope = self._rope_tables(latents_BCTHW)
        time_1D, modulation_16D = self._time_embed(timestep)
        for block, text_state in zip(self.module.blocks, text_states, strict=True):
            x_BND = self._block(block, x_BND, modulation_16D, rope, text_state)
        return self._head(x_BND, time_1D, latents_BCTHW.shape)

    def _patch_embed(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        embedding = self.module.patch_embedding
        patches = F.conv3d(latents_BCTHW.to(self.dtype), embedding.weight, embedding.bias, stride=self.patch)
        return patches.flatten(2).transpose(1, 2).contiguous()

    def _rope_tables(self, latents_BCTHW: torch.Tensor) -> Rope:
        shape = latents_BCTHW.shape[2:]
        if shape not in self._rope:
            cos_1N1K, sin_1N1K = self.module.rope(latents_BCTHW)
            # diffusers keeps each angle twice, once for each channel of its pair.
            self._rope = {shape: (cos_1N1K[0, ..., 0::2].contiguous(), sin_1N1K[0, ..., 1::2].contiguous())}
        return self._rope[shape]

    def _time_embed(self, timestep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedder = self.module.condition_embedder
        waves = embedder.timesteps_proj(timestep.reshape(1)).to(embedder.time_embedder.linear_1.weight.dtype)
        time_1D = embedder.time_embedder(waves).to(self.dtype)
        return time_1D, embedder.time_proj(F.silu(time_1D)).unflatten(1, (6, -1))

    def _block(
        self,
        block: Any,
        x_BND: torch.Tensor,
        modulation_16D: torch.Tensor,
        rope: Rope,
        text_state: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (
            block.scale_shift_table.float() + modulation_16D.float()
        ).chunk(6, dim=1)

        normed_BND = affine_norm(x_BND, weight=1 + scale, bias=shift, eps=self.eps)
        x_BND = gated_residual(x_BND, self._self_attention(block.attn1, normed_BND, rope), gate=gate)

        x_BND = x_BND + self._cross_attention(block.attn2, self._text_norm(block.norm2, x_BND), text_state)

        normed_BND = affine_norm(x_BND, weight=1 + ffn_scale, bias=ffn_shift, eps=self.eps)
        return gated_residual(x_BND, self._feed_forward(block.ffn, normed_BND), gate=ffn_gate)

    def _self_attention(self, attn: Any, x_BND: torch.Tensor, rope: Rope) -> torch.Tensor:
        q_BNHK = self._rotated(attn.norm_q, attn.to_q(x_BND), rope)
        k_BNHK = self._rotated(attn.norm_k, attn.to_k(x_BND), rope)
        v_BNHK = attn.to_v(x_BND).unflatten(-1, (self.num_heads, -1))
        return attn.to_out[0](attention(q_BNHK, k_BNHK, v_BNHK))

    def _rotated(self, norm: Any, x_BND: torch.Tensor, rope: Rope) -> torch.Tensor:
        return qk_norm_rope(x_BND, weight=norm.weight, eps=self.eps, num_heads=self.num_heads, rope=rope)

    def _text_state(self, attn: Any, text_BLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k_BLHK = qk_norm(
            attn.to_k(text_BLD), weight=attn.norm_k.weight, eps=self.eps, num_heads=self.num_heads
        )
        return k_BLHK, attn.to_v(text_BLD).unflatten(-1, (self.num_heads, -1))

    def _cross_attention(
        self, attn: Any, x_BND: torch.Tensor, text_state: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        q_BNHK = qk_norm(attn.to_q(x_BND), weight=attn.norm_q.weight, eps=self.eps, num_heads=self.num_heads)
        return attn.to_out[0](attention(q_BNHK, *text_state))

    def _text_norm(self, norm: Any, x_BND: torch.Tensor) -> torch.Tensor:
        if isinstance(norm, torch.nn.Identity):  # checkpoints without cross_attn_norm
            return x_BND
        return affine_norm(x_BND, weight=norm.weight.float(), bias=norm.bias.float(), eps=self.eps)

    def _feed_forward(self, ffn: Any, x_BND: torch.Tensor) -> torch.Tensor:
        activation, _, output = ffn.net
        return output(gelu(activation.proj(x_BND)))

    def _head(self, x_BND: torch.Tensor, time_1D: torch.Tensor, latent_shape: torch.Size) -> torch.Tensor:
        shift, scale = (self.module.scale_shift_table + time_1D.unsqueeze(1)).chunk(2, dim=1)
        x_BND = affine_norm(x_BND, weight=1 + scale, bias=shift, eps=self.eps)
        return self._unpatchify(self.module.proj_out(x_BND), latent_shape)

    def _unpatchify(self, x_BNP: torch.Tensor, latent_shape: torch.Size) -> torch.Tensor:
        batch, _, *sides = latent_shape
        grid = [side // patch for side, patch in zip(sides, self.patch, strict=True)]
        cells = x_BNP.reshape(batch, *grid, *self.patch, -1)  # batch, t, h, w, pt, ph, pw, channel
        return cells.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(batch, -1, *sides)
