"""`Feeding`: whether a run waits for its loader, and how many workers would keep up."""

import time
from typing import Any

from hotloop.data import Stream, WorkersAdvice, workers_for

LEAST = 4  # batches over which the waiting is judged
NOTABLE_WAIT = 0.2  # share of the time, from which on workers are added
MOST_CHANGES = 3  # of the number of workers in a run
MOST_BATCHES = 400  # in which the loader is watched
WORTH_IT = 1.0  # seconds that a run must still take for new workers to start, or its length is not known


class Feeding:
    """Measures in the first steps how long the loop waits for its loader."""

    def __init__(self) -> None:
        self.is_open = True
        self._changes = 0
        self._start: tuple[float, float, int] | None = None  # moment, seconds waited and batches when it began to look
        self._seen = 0

    def end(self) -> None:
        """Look no more."""
        self.is_open = False

    def advice(self, stream: Stream[Any], left: int | None) -> WorkersAdvice | None:
        """How many workers to use, once that is known; `left` is the number of batches that remain."""
        now = (time.perf_counter(), stream.waited, stream.batches)
        if self._start is None or now[2] < self._start[2]:
            self._start = now
            return None
        seconds, waited, batches = now[0] - self._start[0], now[1] - self._start[1], now[2] - self._start[2]
        if batches < LEAST:
            return None
        self._start, self._seen = now, self._seen + batches
        self.is_open = self._seen < MOST_BATCHES
        if waited < NOTABLE_WAIT * seconds or (left is not None and left * seconds / batches < WORTH_IT):
            return None
        pace, share = seconds / batches, waited / seconds
        # A device that is waited for would do a step in less than what is not spent waiting; half is a fair guess.
        step = max((seconds - waited) / batches / 2, 1e-4)
        advice = workers_for(
            stream.source,
            batch_seconds=pace,
            waited=share,
            step_seconds=step,
            workers=stream.workers,
            batch_bytes=stream.batch_bytes,
        )
        self._changes += 1
        self._start = None
        self.is_open = advice.number > stream.workers and self._changes < MOST_CHANGES
        return advice
