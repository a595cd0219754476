"""Encoded prompts, kept from batch to batch and from run to run.

Shapes: L text tokens, E channels of the text encoder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from pipeline.config import EmbeddingStore
from pipeline.embeddings import from_bytes, to_bytes
from pipeline.models.protocol import VideoModel

# About 4 MB each at most; as many as are encoded ahead at a time. Prompts repeat across batches: a negative
# prompt is in every one.
KEPT_PROMPTS = 256


class PromptCache:
    """Encoded prompts on the CPU by (encoder, text): the last used ones here, all in the store.

    store: what outlives this process; None: nothing does.
    """

    def __init__(self, store: EmbeddingStore | None) -> None:
        self._store = store
        self._kept: OrderedDict[tuple[str, str], torch.Tensor] = OrderedDict()

    def encode(self, model: VideoModel, texts: Sequence[str], *, encoder: str) -> list[torch.Tensor]:
        """One (L, E) for each text. What is not kept is encoded all at once, each distinct text once.

        encoder: its revision (`encoder_revision`).
        """
        found = {text: self._find(encoder, text) for text in dict.fromkeys(texts)}
        missing = [text for text, states_LE in found.items() if states_LE is None]
        new = self._encoded(model, missing, encoder) if missing else {}
        known = {text: new[text] if states_LE is None else states_LE for text, states_LE in found.items()}
        for text, states_LE in known.items():
            self._keep((encoder, text), states_LE)
        return [known[text] for text in texts]

    def _encoded(self, model: VideoModel, texts: Sequence[str], encoder: str) -> dict[str, torch.Tensor]:
        encoded = dict(zip(texts, model.encode(texts), strict=True))
        for text, states_LE in encoded.items():
            # What a failing card gives must not fail every later run too.
            if self._store is not None and states_LE.isfinite().all():
                self._store.put(encoder, text, to_bytes(states_LE))
        return encoded

    def _find(self, encoder: str, text: str) -> torch.Tensor | None:
        if (encoder, text) in self._kept:
            return self._kept[encoder, text]
        content = self._store.get(encoder, text) if self._store is not None else None
        return None if content is None else from_bytes(content)

    def _keep(self, key: tuple[str, str], states_LE: torch.Tensor) -> None:
        self._kept[key] = states_LE
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT_PROMPTS:
            self._kept.popitem(last=False)
