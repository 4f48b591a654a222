"""`ProfilerTrace`: some steps under PyTorch's profiler, with a mark where each ends."""

import gzip
import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from hotloop._torch import profiler_runs
from hotloop.device.backend import backend_of
from hotloop.device.clock import synchronize
from hotloop.errors import BadArgument
from hotloop.profiling.trace_events import MARK, TraceEvent, events_in


class ProfilerTrace:
    """Without stacks, shapes or memory: those would slow the host down, and its share is what is to be measured."""

    def __init__(self, device: torch.device) -> None:
        self.steps = 0
        self.skipped = 0
        self.peak: int | None = None
        self._device = device
        self._begun = False
        self._profiler = profile(activities=_activities(device))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record what runs inside the block."""
        if profiler_runs():
            raise BadArgument(
                "the loop runs under a profiler of its own, and PyTorch has only one",
                fix="take the other profiler out of the loop",
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")  # there is one cycle
            self._profiler.start()
        try:
            yield
        finally:
            synchronize(self._device)  # so that the device has done what belongs to the last step
            self.peak = backend_of(self._device).max_memory_allocated()
            self._profiler.stop()

    def begin(self) -> None:
        """The first step begins here."""
        synchronize(self._device)
        backend_of(self._device).reset_peak_memory_stats()
        _mark()

    def mark(self) -> None:
        """A step ends here."""
        _mark()
        self.steps += 1

    @cached_property
    def trace(self) -> bytes:
        """The recording as PyTorch writes it for Perfetto and Chrome, compressed."""
        with tempfile.TemporaryDirectory(prefix="hotloop-") as folder:
            path = Path(folder, "trace.json.gz")
            self._profiler.export_chrome_trace(str(path))
            return path.read_bytes()

    @cached_property
    def events(self) -> list[TraceEvent]:
        return events_in(json.loads(gzip.decompress(self.trace)))


def _mark() -> None:
    with record_function(MARK):
        pass


def _activities(device: torch.device) -> list[ProfilerActivity]:
    """The host, and the device where it has a timeline of its own. A GPU that is not used is left alone."""
    other = backend_of(device).profiler_activity
    return [ProfilerActivity.CPU, *([getattr(ProfilerActivity, other)] if other else [])]
