"""Makes the built-in model: `python -m pipeline.models.tiny.build [folder]`.

A Wan2.1 text-to-video pipeline in the diffusers format with seeded random weights, a few megabytes in all. It
shows and tests everything but beauty: its clips are moving colours that depend on prompt and seed alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

SEED = 20_260
TEXT_CHANNELS = 64
LATENT_CHANNELS = 16

DEFAULTS = {
    "display_name": "built-in demonstration model",
    "width": 64,
    "height": 64,
    "num_frames": 17,
    "fps": "8",
    "steps": 20,
    "guidance_scale": 4.0,
    "negative_prompt": "",
    "resolutions": {"64p": [64, 64], "96p": [128, 96], "128p": [224, 128], "128p-portrait": [128, 224]},
    "min_side": 16,
    "max_side": 256,
    "max_frames": 81,
}

# Enough that an English prompt takes about one token a word, and one a letter where it does not.
WORDS = """
a an the of in on at to with and or from by over under through into its their his her is are as it this
that then while two three one many red orange yellow green blue purple black white golden silver dark
bright small large tall old young soft slow fast cat dog bird horse fish tiger lion fox rabbit bear man
woman child boy girl people crowd car train boat bicycle plane balloon balloons kite city street house
room kitchen window door table tree trees forest mountain river lake ocean sea beach sand snow rain cloud
clouds sky sun moon stars night day morning evening sunset sunrise light shadow fire smoke water wave
waves wind grass flower flowers garden field road bridge walking running jumping flying swimming sitting
standing dancing playing eating drinking looking moving turning falling rising camera shot close wide
aerial view style film cinematic video portrait
"""


def main(folder: Path) -> None:
    """Write the checkpoint, its defaults beside it. The model card is kept by hand."""
    torch.manual_seed(SEED)
    tokenizer = build_tokenizer(WORDS.split())
    text_encoder = build_text_encoder(len(tokenizer), channels=TEXT_CHANNELS)
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        num_res_blocks=1,
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )
    transformer = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_CHANNELS,
        freq_dim=64,
        ffn_dim=256,
        num_layers=3,
    )
    with torch.no_grad():
        spread_colours(vae)
        heed_text(transformer)
    save(folder, tokenizer, text_encoder.half(), vae.half(), transformer.half())
    (folder / "vgbatch.json").write_text(json.dumps(DEFAULTS, indent=2) + "\n", encoding="utf-8")


def build_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A unigram tokenizer of words and letters, of bytes for the rest: it reads every prompt."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    # A piece's score is a log probability: a word must beat its letters, a letter its bytes.
    byte_pieces = [(f"<0x{value:02X}>", -20.0) for value in range(256)]
    letters = [(chr(code), -6.0) for code in range(33, 127)] + [("▁", -3.0)]
    pieces = [(f"▁{word}", -5.0) for word in dict.fromkeys(words) if len(word) > 1] + [("▁a", -5.0)]
    backend = Tokenizer(models.Unigram([*special, *byte_pieces, *letters, *pieces], 2, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens([AddedToken(token, special=True) for token, _ in special])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def build_text_encoder(num_tokens: int, *, channels: int) -> Any:
    """A random umT5 encoder of two layers, whose output differs clearly from token to token."""
    config = UMT5Config(
        vocab_size=num_tokens,
        d_model=channels,
        d_kv=16,
        num_heads=channels // 16,
        d_ff=2 * channels,
        num_layers=2,
        feed_forward_proj="gated-gelu",
    )
    return UMT5EncoderModel(config).eval()


def spread_colours(vae: Any) -> None:
    """Scale the decoder's last layer so that noise decodes to the middle of the range, well spread."""
    output = vae.decoder.conv_out
    output.weight.mul_(0.05)  # far from where the decoder clamps, so that the spread can be measured
    video = vae.decode(torch.randn(1, vae.config.z_dim, 3, 8, 8)).sample
    rows_per_colour = output.out_channels // 3  # the pixels of a patch, where the VAE has them
    spread, middle = (
        statistic.repeat_interleave(rows_per_colour) for statistic in torch.std_mean(video, dim=(0, 2, 3, 4))
    )
    output.weight.mul_((0.4 / spread).view(-1, 1, 1, 1, 1))
    output.bias.sub_(middle).mul_(0.4 / spread)


def heed_text(transformer: Any) -> None:
    """Make the text count: by chance, a prompt's few tokens drown among 500 rows of padding."""
    embedder = transformer.condition_embedder.text_embedder
    silent = [embedder.linear_1, embedder.linear_2]
    for block in transformer.blocks:
        cross = block.attn2
        silent += [cross.to_k, cross.to_v]  # with no bias anywhere, padding has no key and no value
        cross.norm_q.weight.mul_(3)
        cross.norm_k.weight.mul_(3)
        cross.to_out[0].weight.mul_(6)
    for linear in silent:
        linear.bias.zero_()


def save(folder: Path, tokenizer: Any, text_encoder: Any, vae: Any, transformer: Any) -> None:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )
    pipeline = WanPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, transformer=transformer, scheduler=scheduler
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
    # The name that transformers 4 and 5 both know.
    for file in (folder / "model_index.json", folder / "tokenizer" / "tokenizer_config.json"):
        text = file.read_text(encoding="utf-8").replace("TokenizersBackend", "PreTrainedTokenizerFast")
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
