"""Writes the trained model as a diffusers checkpoint in half precision, its few-step update beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from diffusers import WanPipeline
from safetensors.torch import save_file

from pipeline.models.tiny import lora
from pipeline.models.tiny.flat import Weights, part_of, require_shapes
from pipeline.models.tiny.networks import (
    Sizes,
    make_scheduler,
    make_text_encoder,
    make_tokenizer,
    make_transformer,
    make_vae,
)
from pipeline.models.tiny.scenes import FPS, NUM_FRAMES
from pipeline.models.tiny.state import State

FEW_STEP_FOLDER = "few_step"
STEPS = 20
UNTUNED_GUIDANCE = 4.0

DEFAULTS = {
    "display_name": "built-in demonstration model",
    "width": 64,
    "height": 64,
    "num_frames": NUM_FRAMES,
    "fps": str(FPS),
    "steps": STEPS,
    "guidance_scale": UNTUNED_GUIDANCE,
    "negative_prompt": "",
    "resolutions": {"64p": [64, 64], "64p-wide": [96, 64], "64p-portrait": [64, 96], "96p": [96, 96]},
    "min_side": 16,
    "max_side": 256,
    "max_frames": 81,
}


def export(state: State, folder: Path, sizes: Sizes) -> None:
    """Needs the parts `vae` and `denoiser`; takes `guidance` and `few_step` where they are there."""
    vae_weights, vae_facts = state.result("vae")
    denoiser, _ = state.result("denoiser")
    tokenizer = make_tokenizer()
    vae = make_vae(sizes, **{key: vae_facts[key] for key in ("latents_mean", "latents_std")})
    text_encoder = make_text_encoder(sizes, num_tokens=len(tokenizer))
    transformer = make_transformer(sizes)
    _load(vae, vae_weights)
    _load(text_encoder, part_of(denoiser, "text_encoder."))
    _load(transformer, part_of(denoiser, "transformer."))
    _save(folder, tokenizer, text_encoder.half(), vae.half(), transformer.half())
    chosen = state.facts("guidance") or {"guidance_scale": UNTUNED_GUIDANCE}
    defaults = DEFAULTS | {"guidance_scale": chosen["guidance_scale"]}
    (folder / "vgbatch.json").write_text(json.dumps(defaults, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder / FEW_STEP_FOLDER, ignore_errors=True)  # another transformer's must not stay
    if state.has(FEW_STEP_FOLDER):
        _save_lora(state.result(FEW_STEP_FOLDER)[0], folder / FEW_STEP_FOLDER)


def _load(module: Any, weights: Weights) -> None:
    """Every parameter; transformers ties names of one tensor, so its state has more names than weights."""
    parameters = dict(module.named_parameters())
    require_shapes(weights, {name: parameter.shape for name, parameter in parameters.items()})
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])


def _save(folder: Path, tokenizer: Any, text_encoder: Any, vae: Any, transformer: Any) -> None:
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer,
        scheduler=make_scheduler(),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
    # The name that transformers 4 and 5 both know.
    for file in (folder / "model_index.json", folder / "tokenizer" / "tokenizer_config.json"):
        text = file.read_text(encoding="utf-8").replace("TokenizersBackend", "PreTrainedTokenizerFast")
        file.write_text(text, encoding="utf-8")


def _save_lora(weights: Weights, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    half = {name: tensor.half().contiguous() for name, tensor in weights.items()}
    save_file(half, folder / lora.FILE_NAME, metadata={"format": "pt"})
