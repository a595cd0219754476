"""How long a run has held its devices: from first to last use, on a monotonic clock."""

from __future__ import annotations

import time


class DeviceMeter:
    """Starts counting when it is made: from then on the devices are this run's."""

    def __init__(self, *, num_devices: int) -> None:
        self._num_devices = num_devices
        self._begin_s = time.monotonic()
        self._last_use_s = self._begin_s

    def touch(self) -> None:
        """A device was in use just now."""
        self._last_use_s = time.monotonic()

    @property
    def device_s(self) -> float:
        """Seconds held so far, all devices together."""
        return (self._last_use_s - self._begin_s) * self._num_devices
