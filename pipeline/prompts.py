"""Encoded prompts, kept from batch to batch.

Shapes: L text tokens, E channels of the text encoder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch

from manifests.job import Bucket
from pipeline.models.protocol import VideoModel

# About 4 MB each at most. Prompts repeat across batches: a negative prompt is in every one.
KEPT_PROMPTS = 256


class PromptCache:
    """Encoded prompts on the CPU by (model, revision, text), the least recently used dropped first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, str], torch.Tensor] = OrderedDict()

    def encode(self, model: VideoModel, bucket: Bucket, texts: Iterable[str]) -> list[torch.Tensor]:
        """One (L, E) tensor for each text; each distinct one is encoded once."""
        return [self._encoded(model, (bucket.model, bucket.revision, text)) for text in texts]

    def _encoded(self, model: VideoModel, key: tuple[str, str, str]) -> torch.Tensor:
        if key not in self._kept:
            self._kept[key] = model.encode(key[-1]).cpu()
            if len(self._kept) > KEPT_PROMPTS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]
