"""What a run says of approximations that nobody has looked at: a preset whose gate was never passed here."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress

from jobs.config import Settings
from manifests.errors import LedgerError
from manifests.job import Bucket
from manifests.presets import EXACT
from manifests.wording import counted
from pipeline.config import NUMERICS
from storage.ledger import Ledger

_FEWEST_CLIPS = 12  # as many prompts of ours as there are for a model without captions


class Unverified:
    """Asked whenever a worker has said what its card is; says each thing once."""

    def __init__(self, buckets: Sequence[Bucket], *, ledger: Ledger, settings: Settings) -> None:
        approximate = [bucket for bucket in buckets if bucket.preset != EXACT]
        self._buckets = {(b.revision, b.lora, b.preset): b for b in approximate}
        self._ledger = ledger
        self._settings = settings
        self._said: set[str] = set()

    def warnings(self, gpu_name: str) -> list[str]:
        """A ledger that another process holds is no reason to wait, nor to warn."""
        if gpu_name in self._said:
            return []
        self._said.add(gpu_name)
        with suppress(LedgerError):
            return [text for bucket in self._buckets.values() if (text := self._warning(bucket, gpu_name))]
        return []

    def _warning(self, bucket: Bucket, gpu_name: str) -> str | None:
        last = self._ledger.last_verification(
            model_revision=bucket.revision,
            lora=bucket.lora,
            preset=bucket.preset,
            numerics=NUMERICS,
            gpu_name=gpu_name,
        )
        if last is None:
            found = "was never verified"
        elif not last.passed:
            found = "did not pass when it was last verified"
        elif last.num_clips < _FEWEST_CLIPS:
            found = f"was last verified with {counted(last.num_clips, 'clip')}, fewer than {_FEWEST_CLIPS},"
        else:
            return None
        what = f"preset {bucket.preset} of {bucket.weights} {found} on {gpu_name}"
        return f"warning: {what}: `{self._command(bucket)}`"

    def _command(self, bucket: Bucket) -> str:
        """What verifies it and tells this ledger; variables and the configuration file hold for it too."""
        values = {"preset": bucket.preset, "model": bucket.model, "lora": bucket.lora}
        given = [name for name in ("out", "ledger") if self._settings.origins.get(name) == f"--{name}"]
        values |= {name: str(getattr(self._settings, name)) for name in given}
        flags = [f"--{name} {shlex.quote(value)}" for name, value in values.items() if value is not None]
        return " ".join(["vgbatch verify", *flags])
