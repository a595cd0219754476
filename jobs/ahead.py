"""Which prompts a worker encodes before it begins its next batch: many at once, since the text encoder is
slow to come to a device and leaves it again. No processes, no files, no clock.
"""

from __future__ import annotations

from collections import deque

from manifests.job import Bucket
from manifests.planner import Plan

# For each worker at a time: as many as an engine keeps in host memory. Encoding them takes umT5-XXL about 8 s
# on an H200, and coming to the card 0.2 s.
TEXTS_AHEAD = 256


class TextsAhead:
    """Shares a plan's prompts out among workers, one window of batches after another.

    A window is of one model and ends when its distinct prompts are TEXTS_AHEAD for each worker, or with a
    batch more. The first batches of a window carry the shares, one each; a prompt that a batch needs before
    another worker has encoded it is simply encoded twice.
    """

    def __init__(self, plan: Plan, *, num_workers: int) -> None:
        self._plan = plan
        self._num_workers = num_workers
        self._stop = 0
        self._shares: deque[tuple[str, ...]] = deque()

    def share(self, number: int) -> tuple[str, ...]:
        """For the worker that is about to get batch `number` of the plan. Ask in the order of batches."""
        if number >= self._stop:
            texts, self._stop = self._window(number)
            workers = range(self._num_workers)
            self._shares = deque(tuple(texts[worker :: self._num_workers]) for worker in workers)
        return self._shares.popleft() if self._shares else ()

    def _window(self, start: int) -> tuple[list[str], int]:
        """Its prompts in the order of need, and the batch behind it."""
        texts: dict[str, None] = {}
        first = self._bucket(start)
        number = start
        while number < self._plan.batches.num_rows and len(texts) < TEXTS_AHEAD * self._num_workers:
            bucket = self._bucket(number)
            if (bucket.model, bucket.revision) != (first.model, first.revision):
                break
            texts |= dict.fromkeys(self._texts(number, guided=bucket.is_guided))
            number += 1
        return list(texts), number

    def _bucket(self, number: int) -> Bucket:
        return self._plan.buckets[self._plan.batches["bucket"][number].as_py()]

    def _texts(self, number: int, *, guided: bool) -> list[str]:
        start, stop = (self._plan.batches[name][number].as_py() for name in ("start", "stop"))
        columns = ("prompt", "negative_prompt") if guided else ("prompt",)
        jobs = self._plan.jobs.slice(start, stop - start)
        return [text for name in columns for text in jobs[name].to_pylist()]
