"""What the parts of the training leave for each other, in one folder, and how long a part may take."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from manifests.errors import Busy, UsageError

CHECKPOINT_EVERY_S = 60.0


class Budget(Protocol):
    """When a part ends."""

    def fraction(self, step: int, start: float) -> float:
        """How much of the part is done, 0 to 1, where `start` of it was when this process took it up."""

    def is_spent(self, step: int) -> bool:
        """Whether this process must stop, even if the part is not done."""


@dataclass
class Minutes:
    """Wall-clock time from now on, set-up included."""

    minutes: float
    began_s: float = field(default_factory=time.monotonic)
    training_since_s: float | None = None

    @property
    def used_s(self) -> float:
        return time.monotonic() - self.began_s

    def fraction(self, step: int, start: float) -> float:
        now_s = self.used_s
        if self.training_since_s is None:  # the schedule is of the time that is left after setting up
            self.training_since_s = now_s
        left_s = max(60 * self.minutes - self.training_since_s, 1e-9)
        return min(1.0, start + (1 - start) * (now_s - self.training_since_s) / left_s)

    def is_spent(self, step: int) -> bool:
        return self.used_s >= 60 * self.minutes


@dataclass
class Steps:
    """A number of steps, whatever the clock says: the same numbers again on the same machine."""

    steps: int
    stop_at: int | None = None

    def fraction(self, step: int, start: float) -> float:
        return min(1.0, step / self.steps)

    def is_spent(self, step: int) -> bool:
        return step >= (self.steps if self.stop_at is None else self.stop_at)


class State:
    """Results are half precision, a few megabytes each, so that they can travel.

    An unfinished part also leaves its optimiser in full precision, in `unfinished/`: with it a part goes on
    exactly where it was; without it from its averaged weights and with a fresh optimiser.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unfinished_folder = folder / "unfinished"
        self._began_s = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    def log(self, message: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {time.monotonic() - self._began_s:7.1f} s  {message}"
        print(line, flush=True)
        with (self.folder / "train.log").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def save_result(self, name: str, weights: Mapping[str, torch.Tensor], **facts: Any) -> None:
        """fp16 weights, and facts (JSON) about them."""
        half = {key: tensor.detach().half().cpu().contiguous() for key, tensor in weights.items()}
        _save(half, self.folder / f"{name}.safetensors", facts)

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.safetensors").is_file()

    def result(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """A result's weights in fp32 and its facts. Raises UsageError."""
        if not self.has(name):
            raise UsageError(f"no {name}.safetensors in {self.folder}", hint=f"run the part `{name}` first")
        weights, facts = _load(self.folder / f"{name}.safetensors")
        return {key: tensor.float() for key, tensor in weights.items()}, facts

    def save_unfinished(self, name: str, tensors: Mapping[str, torch.Tensor], **facts: Any) -> None:
        self.unfinished_folder.mkdir(exist_ok=True)
        full = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        _save(full, self.unfinished_folder / f"{name}.safetensors", facts)

    def unfinished(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        file = self.unfinished_folder / f"{name}.safetensors"
        return _load(file) if file.is_file() else None

    def forget_unfinished(self, name: str) -> None:
        (self.unfinished_folder / f"{name}.safetensors").unlink(missing_ok=True)

    def save_facts(self, name: str, facts: Mapping[str, Any]) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def facts(self, name: str) -> dict[str, Any] | None:
        file = self.folder / f"{name}.json"
        try:
            return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        except ValueError as error:
            raise _damaged(file) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Held by one process at a time. Raises Busy."""
        with (self.folder / ".lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(
                    f"another process trains in {self.folder}", hint="wait for it, or give another `--state`"
                ) from None
            yield


def _save(tensors: Mapping[str, torch.Tensor], file: Path, facts: Mapping[str, Any]) -> None:
    partial = file.with_name(file.name + ".partial")  # a killed process must not leave half a file
    save_file(dict(tensors), partial, metadata={"facts": json.dumps(facts)})
    partial.replace(file)


def _load(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        with safe_open(file, framework="pt") as content:
            facts = json.loads((content.metadata() or {}).get("facts", "{}"))
            return {key: content.get_tensor(key) for key in content.keys()}, facts  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise _damaged(file) from error


def _damaged(file: Path) -> UsageError:
    return UsageError(
        f"damaged, so not what a part has left: {file}", hint="remove it and run its part again"
    )
