"""Our side of every stage. When the engine's interface changes, this file changes, and no other of the bench.

Shapes: B clips, C latent channels, T latent frames, H and W latent sides; pictures have 3 colours, F frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from manifests.job import Batch, Bucket, Job, Weights
from pipeline.approx.fp8 import fp8_convert, fp8_support
from pipeline.approx.fp8_decoder import fp8_conv_maker
from pipeline.approx.presets import Approximation
from pipeline.approx.sparse_attention import BlockSparseAttention
from pipeline.bench.setting import SEED, GuidedInputs, Setting
from pipeline.bench.switches import with_cudnn
from pipeline.bench.weights import Parts
from pipeline.config import EngineConfig, ModelSource, resolved
from pipeline.engine import Engine, Loaded
from pipeline.graph.attention_choice import backend_chooser
from pipeline.models.families import WAN_NEGATIVE_PROMPT
from pipeline.models.protocol import Piece, joined
from pipeline.models.wan import WanModel
from pipeline.models.wan_transformer import BackendOf, WanTransformer
from pipeline.models.wan_vae.causal import plain_conv
from pipeline.rendering import Rendering

TEXTS = {
    "prompt": "A red fox runs along a narrow path through a snowy forest at sunrise, its breath visible in "
    "the cold air, golden light falls between tall pine trees, snow rises from its paws, the camera follows "
    "from the side at the height of its eyes, shallow depth of field, natural colours, cinematic wide shot",
    "negative_prompt": WAN_NEGATIVE_PROMPT,
}
_SOURCE = ModelSource(weights=Weights("bench"), folder=Path("bench"), base_revision="bench", engine="wan")


def guided_step(
    setting: Setting,
    module: Any,
    inputs: GuidedInputs,
    *,
    fp8: bool = False,
    sparse: BlockSparseAttention | None = None,
) -> Callable[[], torch.Tensor]:
    """Both forwards of a step and their combination. fp8: of blocks in 8 bits; the module's own then go.

    sparse: the attention of a late step. Clips that are too short for it have a dense one.

    What is the same at every step of a clip is computed here, once: text keys and values, timestep tables.
    """
    model = _model(setting, experts=[module], fp8=fp8)
    with torch.inference_mode():
        denoiser = model.denoiser(
            [inputs.prompt_LE], [inputs.negative_LE], timesteps=inputs.timestep.reshape(1), expert=0
        )

    @torch.inference_mode()
    def step() -> torch.Tensor:
        return denoiser(inputs.latents_1CTHW, index=0, guidance_scale=inputs.guidance_scale, sparse=sparse)

    return step


class Decoding:
    """A call decodes latents to RGB in [0, 1] on the device, piece by piece; the engine keeps none of them.

    vae: in `vae_dtype`, ours to re-arrange. frames_at_once: as WanModel's. fp8: of convolutions in 8 bits.
    """

    def __init__(
        self,
        setting: Setting,
        vae: Any,
        latents_1CTHW: torch.Tensor,
        *,
        frames_at_once: int | None = None,
        fp8: bool = False,
    ) -> None:
        self._model = _model(setting, vae=vae, frames_at_once=frames_at_once, fp8=fp8)
        self._latents_1CTHW = latents_1CTHW

    def __call__(self) -> None:
        with_cudnn(self._drop_pieces, deterministic=True)()

    def video(self) -> torch.Tensor:
        """All of it, (3, F, H, W)."""
        return joined(with_cudnn(self._keep_pieces, deterministic=True)())

    @torch.inference_mode()
    def _drop_pieces(self) -> None:
        for _ in self._model.decode(self._latents_1CTHW):
            pass

    @torch.inference_mode()
    def _keep_pieces(self) -> list[Piece]:
        return list(self._model.decode(self._latents_1CTHW))


def vae_dtype(setting: Setting) -> torch.dtype:
    """The one that the engine decodes in."""
    return getattr(torch, resolved(_config(setting)).vae_dtype)


def attention(setting: Setting) -> str:
    """The library that the engine takes for self-attention at this size."""
    config = setting.shape.transformer
    heads, channels = config["num_attention_heads"], config["attention_head_dim"]
    return _backend_of(setting)((1, setting.num_tokens, heads, channels))


def make_engine(setting: Setting, parts: Parts, *, approximation: Approximation | None = None) -> Engine:
    """An engine that has the bench's model loaded already, in place of one read from a checkpoint.

    approximation: in place of `exact`; where it has fp8 the blocks of the parts' modules go.
    """
    vae = setting.weights.vae(device=setting.device).to(vae_dtype(setting))
    fp8 = approximation is not None and approximation.fp8
    model = _model(setting, vae=vae, fp8=fp8, **vars(parts))
    loaded = Loaded(source=_SOURCE, model=model, fp8=fp8)
    return Engine(_config(setting), loaded=loaded, approximation=approximation)


def encode(engine: Engine, setting: Setting, prompts: Sequence[str]) -> None:
    """Prompts of coming clips, all at once, as a run has it."""
    engine.encode(_batch(setting, num_clips=1, guided=False, texts=TEXTS).bucket, prompts)


def clips(
    engine: Engine,
    setting: Setting,
    *,
    num_clips: int = 1,
    guided: bool = True,
    texts: Mapping[str, str] = TEXTS,
) -> Callable[[], Rendering]:
    """One batch of whole clips, their frames on the host. The engine encodes a text it has not seen yet."""
    batch = _batch(setting, num_clips=num_clips, guided=guided, texts=texts)

    def call() -> Rendering:
        rendering = engine.render(batch)
        assert all(clip.frames is not None for clip in rendering.clips), "finite weights give finite clips"
        return rendering

    return with_cudnn(call, deterministic=True)


def _model(
    setting: Setting,
    *,
    experts: Sequence[Any] = (),
    vae: Any = None,
    text_encoder: Any = None,
    tokenizer: Any = None,
    frames_at_once: int | None = None,
    fp8: bool = False,
) -> WanModel:
    """What load_wan makes of a checkpoint; a stage leaves out what it has no use for."""
    shape, backend_of = setting.shape, _backend_of(setting)
    convert = fp8_convert(fp8_support(setting.device, dtype=setting.dtype)) if fp8 else None
    make_conv = fp8_conv_maker(setting.device, dtype=vae_dtype(setting)) if fp8 else plain_conv
    train_timesteps = shape.scheduler.get("num_train_timesteps", 1000)
    return WanModel(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        experts=[WanTransformer(expert, backend_of=backend_of, convert=convert) for expert in experts],
        scheduler_config=shape.scheduler,
        boundary_timestep=None if shape.boundary_ratio is None else shape.boundary_ratio * train_timesteps,
        frames_at_once=frames_at_once,
        make_conv=make_conv,
    )


def _backend_of(setting: Setting) -> BackendOf:
    file = _config(setting).attention_choices
    return backend_chooser(dtype=setting.dtype, device=setting.device, file=file)


def _config(setting: Setting) -> EngineConfig:
    return EngineConfig(device=setting.device, models={_SOURCE.weights: _SOURCE})


def _batch(setting: Setting, *, num_clips: int, guided: bool, texts: Mapping[str, str]) -> Batch:
    shape = setting.shape
    bucket = Bucket(
        model=_SOURCE.weights.model,
        revision=_SOURCE.revision,
        preset="exact",
        width=setting.width,
        height=setting.height,
        num_frames=setting.num_frames,
        steps=setting.steps,
        guidance_scale=shape.guidance_scale if guided else 1.0,
        guidance_scale_2=shape.guidance_scale_2 if guided else None,
        flow_shift=shape.flow_shift,
    )
    jobs = tuple(_job(bucket, number, fps=shape.fps, texts=texts) for number in range(num_clips))
    return Batch(number=0, bucket=bucket, jobs=jobs, size=num_clips, cap=num_clips)


def _job(bucket: Bucket, number: int, *, fps: Fraction, texts: Mapping[str, str]) -> Job:
    return Job(
        id=f"bench-{number}",
        fingerprint="0" * 64,
        prompt=texts["prompt"],
        negative_prompt=texts["negative_prompt"],
        width=bucket.width,
        height=bucket.height,
        num_frames=bucket.num_frames,
        fps=fps,
        seed=SEED + number,
        steps=bucket.steps,
        guidance_scale=bucket.guidance_scale,
        guidance_scale_2=bucket.guidance_scale_2,
        flow_shift=bucket.flow_shift,
        preset=bucket.preset,
        model=bucket.model,
        crf=18,
        encoder_preset="medium",
    )
