"""`StepTimer`: seconds of a batch in the steps that a run is about to make, with the device idle at both ends."""

import math
import time

from hotloop.device.clock import synchronize
from hotloop.tune.feeding import NOTABLE_WAIT
from hotloop.tune.tuned_run import Steps, TunedRun

CPU_STEPS = 2  # at most that are timed at once on a CPU


class StepTimer:
    """Times steps of a run while they pass.

    On a CPU, seconds are those in which this thread computed, which other programs hardly change.
    """

    def __init__(self, run: TunedRun) -> None:
        self.host = math.inf  # seconds in which the host handed over a batch to an idle device, when it was timed last
        self.is_starved = False  # whether the loop waited for its loader while it was timed last
        self._run, self._device = run, run.subject.device
        self._clock = time.thread_time if run.subject.backend.is_host else time.perf_counter
        self._start: float | None = None  # while the clock runs
        self._seconds = 0.0

    def timed(self, steps: int, seconds: float) -> Steps[float]:
        """Seconds of a batch over the next steps, synchronized at both ends.

        On a CPU, those of the quickest of a few steps: other programs disturb some.
        """
        largest = self._run.loop.ranks.largest
        if self._run.subject.backend.is_host:
            quickest = math.inf
            for _ in range(min(steps, CPU_STEPS)):
                self._reset()
                self._begin()
                yield 0
                self.pause()
                quickest = min(quickest, self._seconds)
            return largest(quickest)
        self._reset()
        began, waited, batches = time.perf_counter(), self._waited, 0
        cycle = math.lcm(*(each.every for each in self._run.subject.objectives))  # batches that train all of them
        goal = steps * cycle
        while batches < goal or self._seconds < seconds:
            while batches < goal:
                ahead = self._run.next
                is_idle = self._begin()
                yield 0
                batches += ahead.batches
                if is_idle and self._start is not None:  # later launches may block on a full queue
                    self.host = min(self.host, (self._clock() - self._start) / ahead.batches)
            self.pause()
            self._seconds = largest(self._seconds)
            rest = seconds - self._seconds
            goal = batches + cycle * max(0, math.ceil(rest / max(self._seconds / batches, 1e-6) / cycle))
        self.is_starved = self._waited - waited > NOTABLE_WAIT * (time.perf_counter() - began)
        return self._seconds / batches

    def pause(self) -> None:
        """Stop the clock, also while training pauses, as for an evaluation."""
        if self._start is not None:
            synchronize(self._device)
            self._seconds += self._clock() - self._start
            self._start = None

    def _reset(self) -> None:
        self.host, self._start, self._seconds = math.inf, None, 0.0

    def _begin(self) -> bool:
        """Start the clock; returns whether it was stopped."""
        if self._start is not None:
            return False
        synchronize(self._device)
        self._start = self._clock()
        return True

    @property
    def _waited(self) -> float:
        """Seconds that the loop has waited for the loader."""
        stream = self._run.next.stream
        return 0.0 if stream is None else stream.waited
