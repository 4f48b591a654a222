"""The trace of PyTorch's profiler: some steps are recorded, and read as events: what happened when, and where."""

import gzip
import json
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from hotloop._torch import profiler_runs
from hotloop.device.backend import backend_of
from hotloop.device.clock import synchronize
from hotloop.errors import BadArgument

MARK = "hotloop.step"  # recorded where a step ends
DATA = "hotloop.data"  # recorded around waiting for data that is no DataLoader's own
EPOCH = "hotloop.epoch"  # recorded around a DataLoader's __iter__, which starts its workers
LOADER = "enumerate(DataLoader)#"  # what PyTorch records around a DataLoader's __next__
UPDATE = "Optimizer.step#"  # and around an update

Kind = Literal[
    "mark",  # host: the end of a step
    "data",  # host: waiting for a batch
    "update",  # host: an optimizer's step
    "operation",  # host: an operation of PyTorch, which may have others inside
    "talk",  # host: with other processes
    "wait",  # host: a call that waits for the device
    "call",  # host: any other call of the device's library, such as the launch of a kernel
    "kernel",  # device
    "copy",  # device: between host and device
    "communication",  # device: with other devices
    "replay",  # device: a CUDA graph, from its first kernel to the end of its last one
]
ON_DEVICE: tuple[Kind, ...] = ("kernel", "copy", "communication")

_WAITS = re.compile(r"^(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize|^(cudaMemcpy|hipMemcpy|cuMemcpyDtoH_v2)$")
_LAUNCHES_GRAPH = re.compile(r"^(cuda|hip|cu)GraphLaunch")
_TALK = ("c10d::", "gloo:", "nccl:", "mpi:", "ucc:")
_CALLS = ("cuda_runtime", "cuda_driver", "xpu_runtime", "privateuse1_runtime")


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A stretch of time on one thread of the host or one stream of the device, in seconds."""

    name: str
    kind: Kind
    start: float
    end: float
    thread: int = 0  # of the device: the stream
    correlation: int | None = None  # the same for a call on the host and what it makes the device do


def events_in(trace: dict[str, Any]) -> list[TraceEvent]:
    """The events of a Chrome trace in the order in which they begin; what tells nothing about time is left out."""
    found = list(_events(trace.get("traceEvents", ())))
    return sorted([*_that_block(found), *_replays(found)], key=lambda event: (event.start, -event.end))


def _events(rows: Iterable[dict[str, Any]]) -> Iterator[TraceEvent]:
    for row in rows:
        if row.get("ph") != "X":
            continue
        name, kind = str(row.get("name", "")), _kind(str(row.get("name", "")), str(row.get("cat", "")))
        if kind is None:
            continue
        start, details = float(row["ts"]) / 1e6, row.get("args") or {}
        thread = row.get("tid")
        yield TraceEvent(
            name,
            kind,
            start,
            start + max(float(row.get("dur", 0)), 0) / 1e6,
            thread if isinstance(thread, int) else 0,
            details.get("correlation") if kind in (*ON_DEVICE, "wait", "call") else None,
        )


def _kind(name: str, category: str) -> Kind | None:
    if category == "user_annotation":
        if name == MARK:
            return "mark"
        if name in (DATA, EPOCH) or name.startswith(LOADER):
            return "data"
        return "update" if name.startswith(UPDATE) else "talk" if name.startswith(_TALK) else None
    if category == "cpu_op":
        return "talk" if name.startswith(_TALK) else "operation"
    if category in _CALLS:
        return "wait" if _WAITS.match(name) else "call"
    if category == "kernel":
        return "communication" if name.lower().startswith(("nccl", "rccl")) else "kernel"
    if category == "gpu_memcpy":
        return "kernel" if "DtoD" in name else "copy"  # within the device it is work like any other
    return "kernel" if category == "gpu_memset" else None


def _that_block(events: list[TraceEvent]) -> Iterator[TraceEvent]:
    """A copy to or from memory that is not pinned holds the host up, though its call says "Async"."""
    held = {event.correlation for event in events if event.kind == "copy" and "Pageable" in event.name}
    for event in events:
        if event.kind == "call" and event.correlation in held and event.correlation is not None:
            yield TraceEvent(event.name, "wait", event.start, event.end, event.thread, event.correlation)
        else:
            yield event


def _replays(events: list[TraceEvent]) -> Iterator[TraceEvent]:
    """The CUDA graphs: all that one does has the correlation of its launch, and no operation of the host behind it."""
    work: dict[int | None, list[TraceEvent]] = {e.correlation: [] for e in events if _LAUNCHES_GRAPH.match(e.name)}
    for event in events:
        if event.kind in ON_DEVICE and event.correlation in work:
            work[event.correlation].append(event)
    for correlation, group in work.items():
        if group:
            start, end = min(e.start for e in group), max(e.end for e in group)
            yield TraceEvent("a CUDA graph", "replay", start, end, group[0].thread, correlation)


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
