"""`StepTimer`: seconds of a batch in the steps that a run is about to make, with the device idle at both ends."""

import math
import time

import torch

from hotloop.device.backend import backend_of
from hotloop.device.clock import synchronize
from hotloop.tune.feeding import NOTABLE_WAIT
from hotloop.tune.tuned_run import Steps, TunedRun

CPU_STEPS = 2  # at most that are timed at once on a CPU


class StepTimer:
    """Times steps of a run while they pass."""

    def __init__(self, run: TunedRun) -> None:
        self.is_starved = False  # whether the loop waited for its loader while it was timed last
        self._run, self._device = run, run.subject.device
        self._stopwatch = Stopwatch(self._device)

    @property
    def host(self) -> float:
        """Seconds in which the host handed over a batch, when it was timed last."""
        return self._stopwatch.host

    def pause(self) -> None:
        """Stop the clock while training pauses, as for an evaluation."""
        self._stopwatch.halt()

    def timed(self, steps: int, seconds: float) -> Steps[float]:
        """Seconds of a batch over the next steps, synchronized at both ends.

        On a CPU, those of the quickest of a few steps: other programs disturb some.
        """
        largest = self._run.loop.ranks.largest
        if self._run.subject.backend.is_host:
            quickest = math.inf
            for _ in range(min(steps, CPU_STEPS)):
                watch = self._stopwatch = Stopwatch(self._device)
                watch.begin()
                yield 0
                watch.halt()
                quickest = min(quickest, watch.seconds)
            return largest(quickest)
        watch = self._stopwatch = Stopwatch(self._device)
        began, waited = time.perf_counter(), self._waited
        cycle = math.lcm(*(each.every for each in self._run.subject.objectives))  # batches that train all of them
        goal = steps * cycle
        while watch.batches < goal or watch.seconds < seconds:
            while watch.batches < goal:
                ahead = self._run.next
                is_idle = watch.begin()
                yield 0
                watch.batches += ahead.batches
                if is_idle:
                    watch.note_host(ahead.batches)
            watch.halt()
            watch.seconds = largest(watch.seconds)
            rest = seconds - watch.seconds
            goal = watch.batches + cycle * max(0, math.ceil(rest / max(watch.seconds / watch.batches, 1e-6) / cycle))
        self.is_starved = self._waited - waited > NOTABLE_WAIT * (time.perf_counter() - began)
        return watch.seconds / watch.batches

    @property
    def _waited(self) -> float:
        """Seconds that the loop has waited for the loader."""
        stream = self._run.next.stream
        return 0.0 if stream is None else stream.waited


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
