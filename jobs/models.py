"""The models a manifest names, each looked up once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jobs.aliases import Aliases, find_model
from manifests.errors import ModelError
from manifests.job import Weights
from manifests.model_spec import ModelSpec
from manifests.wording import counted
from pipeline.config import ModelSource
from pipeline.memory.residency import is_streamed, smallest_card_bytes
from pipeline.models.resolve import ResolvedModel


class Models:
    """pinned: the revision first recorded for a model name, so that an unpinned hub id stays the same."""

    def __init__(self, *, aliases: Aliases, pinned: Callable[[str], str | None]) -> None:
        self._aliases = aliases
        self._pinned = pinned
        self._resolved: dict[Weights, ResolvedModel | ModelError] = {}

    def spec(self, weights: Weights) -> ModelSpec:
        """Raises ModelError, the same each time, for weights that cannot be had."""
        if weights not in self._resolved:
            self._resolved[weights] = self._resolve(weights)
        resolved = self._resolved[weights]
        if isinstance(resolved, ModelError):
            raise resolved
        return resolved.spec

    def sources(self) -> dict[Weights, ModelSource]:
        """Where the weights of every model asked for so far lie."""
        return {weights: resolved.source for weights, resolved in self._found()}

    def announcements(self) -> list[str]:
        """One line for each model in use that says what it is and which engine runs it."""
        return [
            f"model {self._label(weights)}: {resolved.display_name}{_sampled(resolved.source)}"
            for weights, resolved in self._found()
        ]

    def streaming_notes(self) -> list[str]:
        """One line for each model in use whose weights do not fit on this machine's cards."""
        card_bytes = smallest_card_bytes()
        if card_bytes is None:
            return []
        return [
            f"{weights}: {_gibibytes(resolved.transformer_bytes)} of transformer weights do not fit on a "
            f"card of {_gibibytes(card_bytes)} beside what a clip needs: every step fetches them from host "
            "memory"
            for weights, resolved in self._found()
            if is_streamed(resolved.transformer_bytes, card_bytes=card_bytes)
        ]

    def _found(self) -> Iterator[tuple[Weights, ResolvedModel]]:
        for weights, resolved in self._resolved.items():
            if not isinstance(resolved, ModelError):
                yield weights, resolved

    def _resolve(self, weights: Weights) -> ResolvedModel | ModelError:
        pinned = self._pinned(weights.model)
        try:
            return find_model(weights, aliases=self._aliases, pinned_revision=pinned)
        except ModelError as error:
            return error

    def _label(self, weights: Weights) -> str:
        target = self._aliases.targets.get(weights.model)
        return str(weights if target is None else weights._replace(model=f"{weights.model} ({target})"))


def _sampled(source: ModelSource) -> str:
    if source.recipe is None:
        return ""
    return f", sampled in {counted(source.recipe.steps, 'step')}: {source.recipe.name}"


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
