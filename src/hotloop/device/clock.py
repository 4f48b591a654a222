"""`measure`: time a call the way a figure may be quoted, warmed up, synchronised, repeated, with its spread."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hotloop.device import as_device, device_error
from hotloop.device.backend import backend_of
from hotloop.errors import BadArgument
from hotloop.printing.text import an
from hotloop.records import Timing


def measure(
    call: Callable[[], Any], *, device: str | torch.device = "cpu", warmup: int = 3, repeats: int = 20
) -> Timing:
    """Seconds per call of `call()`, which does its work on `device`.

    Work on a GPU is only queued when a call returns, so the clock is read after the device has finished. Calls that
    are too short to time alone are repeated until one measurement takes about a millisecond.

    >>> a = torch.ones(64, 64)
    >>> timing = measure(lambda: a @ a, repeats=5)
    >>> 0 < timing.low <= timing.median <= timing.high
    True
    """
    if repeats < 1 or warmup < 0:
        raise BadArgument(f"repeats={repeats}, warmup={warmup}", fix="repeats must be at least 1, warmup at least 0")
    if not callable(call):
        raise BadArgument(
            f"measure was given {an(type(call).__name__)}, which cannot be called",
            fix="give the work itself, not its result: measure(lambda: model(x))",
        )
    target = as_device(device)
    try:
        synchronize(target)
    except (AssertionError, RuntimeError) as error:
        raise device_error(target, error) or error from error
    for _ in range(warmup):
        call()
    calls = max(1, round(1e-3 / max(_seconds(call, 1, target), 1e-7)))
    times = [_seconds(call, calls, target) / calls for _ in range(repeats)]
    low, median, high = np.quantile(times, [0.05, 0.5, 0.95]).tolist()
    return Timing(median, low, high, repeats=repeats, calls_per_repeat=calls, device=str(target))


class Clock:
    """A clock that measures work on a device without waiting for it: `lap` marks a moment, `seconds` reads it later."""

    def __init__(self, device: torch.device) -> None:
        self._backend = backend_of(device)
        self._start = self.lap()

    def lap(self) -> Any:
        """The moment when the device has done what was queued so far; a CPU has done it."""
        backend = self._backend
        if not backend.non_blocking:
            backend.synchronize()
            return time.perf_counter()
        event = backend.new_event(enable_timing=True)
        event.record(backend.current_stream())
        return event

    def has_reached(self, lap: Any) -> bool:
        """Whether the device has got to a moment."""
        return not self._backend.non_blocking or lap.query()

    def seconds(self, lap: Any = None) -> float:
        """Seconds from the making of the clock to a moment, or to now. Waits until the device has got there."""
        end = self.lap() if lap is None else lap
        if not self._backend.non_blocking:
            taken: float = end - self._start
            return taken
        end.synchronize()
        return float(self._start.elapsed_time(end)) / 1e3


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on `device` is done; a CPU has nothing queued."""
    backend_of(device).synchronize()


def _seconds(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return time.perf_counter() - start
