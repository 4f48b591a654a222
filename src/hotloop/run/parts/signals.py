"""Signals and a time limit that end a run between two steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part
from hotloop.run.stop import FAILURES, is_of_a_loader


class Signals(Part):
    """Listens to Ctrl-C, and with `terminate` to SIGTERM, which schedulers send at the end of a job."""

    name = "signals"

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        self._until = None if asked.time_limit is None else time.perf_counter() + asked.time_limit
        self._terminate = asked.saver is not None  # else there is nothing that a job's end could wait for
        self._is_over = False
        if self._until is None and not self._terminate:
            self.idle = ("after_step",)

    @contextmanager
    def around(self) -> Iterator[None]:
        stop = self.run.stop
        try:
            with stop.listening(terminate=self._terminate):
                yield
        except FAILURES as error:
            if not (self._is_over and stop.asked and is_of_a_loader(error)):
                raise  # PyTorch tells of a worker that the same signal has ended, wherever this thread is by then

    def after_step(self, loss: Tensor | None, batches: int) -> None:
        self.run.stop.shield()
        if self._until is not None and time.perf_counter() > self._until:
            self.run.stop.ask("the time limit")

    def finish(self) -> None:
        self._is_over = True
