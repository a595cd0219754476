"""The built-in model's kind of tokenizer: a given list of words, and letters and bytes for all the others."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# Enough that an English prompt takes about one token a word, and one a letter where it does not.
COMMON_WORDS = """
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
