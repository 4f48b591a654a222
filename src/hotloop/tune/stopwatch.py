"""`Stopwatch`: seconds of training steps, with the device idle at both ends."""

import math
import time

import torch

from hotloop.device.backend import backend_of
from hotloop.device.clock import synchronize


class Stopwatch:
    """Seconds of training between two synchronizations.

    On a CPU they are seconds in which this thread computed, which other programs hardly change.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self.host = math.inf  # seconds in which the host hands over a batch to a device that has nothing to do
        self.batches = 0
        self._device = device
        self._clock = time.thread_time if backend_of(device).is_host else time.perf_counter
        self._start: float | None = None

    def begin(self) -> bool:
        """Start it; returns whether it was stopped."""
        if self._start is not None:
            return False
        synchronize(self._device)
        self._start = self._clock()
        return True

    def note_host(self, batches: int) -> None:
        """Note the host time of the first step after a start; later launches may block on a full queue."""
        if self._start is not None:
            self.host = min(self.host, (self._clock() - self._start) / batches)

    def halt(self) -> None:
        if self._start is not None:
            synchronize(self._device)
            self.seconds += self._clock() - self._start
            self._start = None
