"""The models a manifest names, each looked up once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from manifests.errors import ModelError
from manifests.model_spec import ModelSpec
from pipeline.config import ModelSource
from pipeline.memory.residency import is_streamed, smallest_card_bytes
from pipeline.models.resolve import ResolvedModel, resolve_model


class Models:
    """pinned: the revision first recorded for a model name, so that an unpinned hub id stays the same."""

    def __init__(self, *, aliases: Mapping[str, str], pinned: Callable[[str], str | None]) -> None:
        self._aliases = aliases
        self._pinned = pinned
        self._resolved: dict[str, ResolvedModel | ModelError] = {}

    def spec(self, name: str) -> ModelSpec:
        """Raises ModelError, the same each time, for a model that cannot be had."""
        if name not in self._resolved:
            self._resolved[name] = self._resolve(name)
        resolved = self._resolved[name]
        if isinstance(resolved, ModelError):
            raise resolved
        return resolved.spec

    def sources(self) -> dict[str, ModelSource]:
        """Where the weights of every model asked for so far lie."""
        return {
            name: resolved.source
            for name, resolved in self._resolved.items()
            if not isinstance(resolved, ModelError)
        }

    def announcements(self) -> list[str]:
        """One line for each model in use that says what it is and which engine runs it."""
        return [
            f"model {name}: {resolved.display_name}"
            for name, resolved in self._resolved.items()
            if not isinstance(resolved, ModelError)
        ]

    def streaming_notes(self) -> list[str]:
        """One line for each model in use whose weights do not fit on this machine's cards."""
        card_bytes = smallest_card_bytes()
        if card_bytes is None:
            return []
        return [
            f"{name}: {_gibibytes(resolved.transformer_bytes)} of transformer weights do not fit on a card "
            f"of {_gibibytes(card_bytes)} beside what a clip needs: every step fetches them from host memory"
            for name, resolved in self._resolved.items()
            if not isinstance(resolved, ModelError)
            and is_streamed(resolved.transformer_bytes, card_bytes=card_bytes)
        ]

    def _resolve(self, name: str) -> ResolvedModel | ModelError:
        try:
            return resolve_model(name, pinned_revision=self._pinned(name), aliases=self._aliases)
        except ModelError as error:
            return error


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
