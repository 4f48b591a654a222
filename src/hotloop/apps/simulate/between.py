"""What the host does between two operations of the device: making batches, and the script's own work."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from hotloop.apps.simulate._torch import current_node
from hotloop.apps.simulate.events import DATA, WORK
from hotloop.apps.simulate.telling import Circumstances, Teller

CALL = 4e-6  # seconds until a call has come to us, and back: PyTorch would not make it without a simulation
LONG = 2e-3  # seconds: less than this is Python and the dispatcher, which are in the cost of each operation


class Between:
    """Measures how long the script keeps the host, on this machine, and tells it."""

    def __init__(self, teller: Teller, circumstances: Circumstances) -> None:
        from resource import RUSAGE_THREAD, getrusage  # noqa: PLC0415  # Windows has none, and is told so before this

        self._usage = partial(getrusage, RUSAGE_THREAD)
        self._teller = teller
        self._circumstances = circumstances
        self._left: tuple[float, float, int] | None = None  # what `_clock` said when the last operation was done
        self._aside = 0.0  # seconds in all that are the simulation's own, and not the script's
        self._worked = 0.0  # seconds in all of operations on the host
        self._aside_then = self._worked_then = 0.0  # both, by then
        self._calls = 0  # of functions of PyTorch, one in another
        self._kept: dict[str, float] = {}  # seconds in each step that are told instead
        self._workers = 0
        self._within = False  # whether that was PyTorch's own backward pass or optimizer, where nobody else works

    def tell_instead(self, kept: dict[str, float], workers: int) -> None:
        """Tell what was measured in another run, by kind and step."""
        self._kept, self._workers = kept, workers

    def stepped(self) -> None:
        """A step ends."""
        for kind, seconds in self._kept.items():
            if seconds:
                self._teller.host(seconds, kind, self._workers if kind == DATA else 0)

    def enters(self) -> None:
        """An operation of the device begins."""
        if self._left is None:
            return
        taken = self._since(self._left) - (self._lost - self._aside_then)
        self._left = None
        if taken > LONG and not self._kept and not (self._within and self._is_within()):
            self._teller.host(taken, WORK)

    def leaves(self) -> None:
        """It is done, and the script goes on."""
        self._within = self._is_within()
        self._aside_then, self._worked_then = self._lost, self._worked
        self._left = self._clock()

    @contextmanager
    def loading(self, workers: int) -> Iterator[None]:
        """A batch is made."""
        self.enters()
        begun, lost = time.perf_counter(), self._lost
        yield
        if not self._kept:
            self._teller.host(max(0.0, time.perf_counter() - begun - (self._lost - lost)), DATA, workers)
        self.leaves()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The simulation does something of its own, in the middle of the script."""
        begun = time.perf_counter()
        yield
        self._aside += time.perf_counter() - begun

    def calls(self) -> tuple[float, float] | None:
        """A function of PyTorch is called; None where that is within another."""
        self._calls += 1
        return (time.perf_counter(), self._worked) if self._calls == 1 else None

    def called(self, before: tuple[float, float] | None) -> None:
        """It is done: of the host's time, what it worked is the script's, and the way there was ours."""
        self._calls -= 1
        if before is not None:
            begun, worked = before
            if self._left is not None and self._left[0] > begun:  # the device had something to do meanwhile
                begun, worked = self._left[0], self._worked_then
            self._aside += CALL + time.perf_counter() - begun - (self._worked - worked)

    def works(self, operation: Callable[[], Any]) -> Any:
        """Run an operation of the host."""
        begun = time.perf_counter()
        result = operation()
        self._worked += time.perf_counter() - begun
        return result

    @property
    def _lost(self) -> float:
        return self._aside + self._teller.freeing

    def _is_within(self) -> bool:
        return self._circumstances.optimizing or current_node() is not None

    def _clock(self) -> tuple[float, float, int]:
        """Seconds on the wall, seconds of this thread, and how often the system gave its core to another."""
        return time.perf_counter(), time.thread_time(), self._usage().ru_nivcsw

    def _since(self, before: tuple[float, float, int]) -> float:
        """Seconds on the wall; of this thread alone where others had its core for a while: that is not the script's."""
        (wall, own, given), now = before, self._clock()
        return now[0] - wall if now[2] == given else now[1] - own
