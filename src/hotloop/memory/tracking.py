"""`track`: where the memory of a training step goes, by phase, by module and over time."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hotloop._torch import DispatchMode, leaves_of, storage_id
from hotloop.errors import BadArgument
from hotloop.memory.phases import OUTSIDE, PHASES, Phases, Visit
from hotloop.memory.storages import Following, live_tensors, storages_of
from hotloop.placement.placing import resolve
from hotloop.placement.sites import user_site
from hotloop.printing.text import an, printable, size
from hotloop.records import Record

POINTS = 2000  # of the timeline that a record keeps
MOST_POINTS = 100_000  # of the timeline while it is recorded

Point = tuple[float, int, str]


@dataclass(frozen=True)
class StepPoint(Record):
    """A point of a step: when, in which phase and module, after which operation, asked for by which line."""

    seconds: float
    phase: str
    module: str
    operation: str
    line: str | None


@dataclass(frozen=True)
class ModuleBytes(Record):
    """The memory of one module. What its submodules do counts to them, except in `forward_peak`."""

    name: str  # as `named_modules` says it; a class in brackets for the model and what is outside; "" for no module
    kind: str  # the class
    forward_peak: int  # the most that was live while its forward ran, above what was live when it began
    saved: int  # activations that it keeps for the backward pass; shared memory counts where it was kept first
    own_new: int  # memory that the operations of its forward asked for, summed over all its calls


@dataclass(frozen=True)
class Track(Record):
    """The live bytes of all tensors on a device while something ran."""

    device: str
    peak: int
    at: StepPoint
    phases: dict[str, int]  # the highest in each
    modules: tuple[ModuleBytes, ...]  # in the order in which they were first seen
    kept: dict[str, int]  # the most that was kept for the backward pass: activations, inputs, parameters
    timeline: tuple[Point, ...]  # (seconds, bytes, phase), thinned
    allocator: dict[str, int] | None = None  # the highest in each phase as CUDA's allocator counts it

    def __str__(self) -> str:
        asides = {"between": "between the steps", "optimizer": "in the optimizer"}
        inside = f"in {self.at.phase}" + (f" of {self.at.module}" if self.at.module else ", outside any module")
        phases = ", ".join(f"{name} {size(peak)}" for name, peak in self.phases.items())
        line = f"\n  {printable(self.at.line)}" if self.at.line else ""
        return f"peak {size(self.peak)} {printable(asides.get(self.at.phase, inside))} ({phases}){line}"


@contextmanager
def track(model: nn.Module, device: str | torch.device | None = None) -> Iterator["Tracking"]:
    """Follow every tensor on `device` (by default that of the model) while the block runs one or more steps.

    Seen are the tensors that go into PyTorch's operations and come out of them, until they end, on a CPU as on a GPU.
    What an operation takes for itself while it runs (a workspace) shows only in the figures of CUDA's allocator, whose
    peak, `torch.cuda.max_memory_allocated`, begins anew inside; and so does what compiled code does. It is an aid for
    diagnosis: every operation passes through Python. The numbers do not change, and nothing remains.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with track(net) as seen:
    ...     net(torch.zeros(16, 4)).sum().backward()
    >>> seen.record().kept["activations"]  # what ReLU gave: 16 rows of 8 numbers of 4 bytes
    512
    """
    if not isinstance(model, nn.Module):
        raise BadArgument(f"the model is {an(type(model).__name__)}", fix="give a torch.nn.Module")
    if device is None:
        device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    seen = Tracking(model, resolve(device))
    try:
        with seen.places.noticed(), saved_tensors_hooks(seen.pack, lambda kept: kept.tensor), seen:
            yield seen
    except BaseException:
        seen.drop()
        raise
    finally:
        seen.close()


@dataclass
class _Figures:
    """What is noted of one module."""

    kind: str
    forward_peak: int = 0
    saved: int = 0
    saved_peak: int = 0
    own_new: int = 0


@dataclass
class _Keep:
    """Memory that autograd keeps, and how often."""

    bytes: int
    what: str
    module: _Figures
    times: int = 0


class _SavedTensor:
    """A tensor that autograd keeps; it ends when autograd frees it."""

    def __init__(self, tensor: Tensor, let_go: Callable[[], None]) -> None:
        self.tensor: Tensor | None = tensor
        self._let_go = let_go

    def __del__(self) -> None:
        self._let_go()


class Tracking(DispatchMode):
    """A `track` that is under way; `record()` says what was seen so far."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._following = Following(device, self._end)
        self.places = Phases(model, live=lambda: self._following.live, done=self._leave)
        self._parameters = {storage_id(s) for t in (*model.parameters(), *model.buffers()) for s in storages_of(t)}
        self._inputs: set[int] = set()  # memory that no forward pass made
        self._modules: dict[str, _Figures] = {}
        self._keeps: dict[int, _Keep] = {}
        self._packed: WeakSet[_SavedTensor] = WeakSet()
        self._kept = dict.fromkeys(("activations", "inputs", "parameters"), 0)
        self._kept_peak = dict(self._kept)
        self._phase = "between"
        self._phases: dict[str, int] = {}
        self._allocator: dict[str, int] | None = {} if device.type == "cuda" else None
        self._peak, self._at = -1, StepPoint(0.0, self._phase, OUTSIDE, "", None)
        self._points: list[Point] = []
        self._begin = time.perf_counter()
        if self._allocator is not None:
            torch.cuda.reset_peak_memory_stats(device)
        for tensor in live_tensors():
            self._inputs.update(key for key, _ in self._following.see(tensor))
        self._points.clear()  # of tensors that ended during the search
        self._begin = time.perf_counter()
        self._note("")

    def record(self) -> Track:
        """What was seen so far."""
        phases = {name: self._phases[name] for name in PHASES if name in self._phases}
        return Track(
            device=str(self._device),
            peak=self._peak,
            at=self._at,
            phases=phases,
            modules=tuple(
                ModuleBytes(name, seen.kind, seen.forward_peak, seen.saved_peak, seen.own_new)
                for name, seen in self._modules.items()
            ),
            kept=dict(self._kept_peak),
            timeline=tuple(thinned(self._points, POINTS)),
            allocator=None if self._allocator is None else dict(self._allocator),
        )

    def close(self) -> None:
        """Take the last figures and follow nothing any more."""
        self._read_allocator()
        self._point()
        self._following.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "profiler":  # the label around an update stands outside of it
            self._turn()
        given = [value for value in leaves_of((args, kwargs)) if isinstance(value, Tensor)]
        for tensor in given:  # what nobody saw being made came from outside, such as a batch of a worker
            self._inputs.update(key for key, _ in self._following.see(tensor))
        result = func(*args, **(kwargs or {}))
        before = self._following.live
        for value in (*leaves_of(result), *given):  # an operation may also enlarge what it was given
            if isinstance(value, Tensor):
                self._count(self._following.see(value))
        if self._following.live != before:
            self._note(str(func))
        return result

    def pack(self, tensor: Tensor) -> _SavedTensor:
        """Note what autograd keeps for the backward pass."""
        keeps = []
        for storage in storages_of(tensor):
            if storage.device == self._device:
                key = storage_id(storage)
                keep = self._keeps.setdefault(key, self._new_keep(storage))
                keep.times += 1
                keeps.append((key, keep))
                if keep.times == 1:
                    self._keep(keep, keep.bytes)
        kept = _SavedTensor(tensor, lambda: self._let_go(keeps))
        self._packed.add(kept)
        return kept

    def drop(self) -> None:
        """After an error: free the saved tensors of a backward pass that never comes."""
        for kept in self._packed:
            kept.tensor = None

    def _new_keep(self, storage: torch.UntypedStorage) -> _Keep:
        key = storage_id(storage)
        what = "parameters" if key in self._parameters else "inputs" if key in self._inputs else "activations"
        return _Keep(storage.nbytes(), what, self._figures())

    def _let_go(self, keeps: list[tuple[int, _Keep]]) -> None:
        for key, keep in keeps:
            keep.times -= 1
            if keep.times == 0:
                self._keeps.pop(key, None)
                self._keep(keep, -keep.bytes)

    def _keep(self, keep: _Keep, change: int) -> None:
        self._kept[keep.what] += change
        self._kept_peak[keep.what] = max(self._kept_peak[keep.what], self._kept[keep.what])
        if keep.what == "activations":
            keep.module.saved += change
            keep.module.saved_peak = max(keep.module.saved_peak, keep.module.saved)

    def _count(self, new: list[tuple[int, int]]) -> None:
        if self._phase == "forward":
            self._figures().own_new += sum(bytes_ for _, bytes_ in new)
        else:
            self._inputs.update(key for key, _ in new)

    def _figures(self) -> _Figures:
        visits = self.places.visits
        name, kind = (visits[-1].name, visits[-1].kind) if visits else (OUTSIDE, "")
        return self._modules.setdefault(name, _Figures(kind))

    def _leave(self, visit: Visit) -> None:
        figures = self._modules.setdefault(visit.name, _Figures(visit.kind))
        figures.forward_peak = max(figures.forward_peak, visit.highest - visit.before)

    def _end(self, key: int, bytes_: int) -> None:
        self._inputs.discard(key)
        if bytes_:
            self._point()

    def _turn(self) -> None:
        """Notice that another phase has begun."""
        phase = self.places.phase()
        if phase != self._phase:
            self._read_allocator()
            self._phase = phase
            self._note("")

    def _note(self, operation: str) -> None:
        """Take the figures after an operation that asked for memory."""
        live = self._following.live
        self._phases[self._phase] = max(self._phases.get(self._phase, 0), live)
        for visit in self.places.visits:
            visit.highest = max(visit.highest, live)
        if live > self._peak:
            self._peak, line = live, user_site()
            now, module = time.perf_counter() - self._begin, self.places.module()
            self._at = StepPoint(now, self._phase, module, operation, None if line is None else str(line))
        self._point()

    def _point(self) -> None:
        self._points.append((time.perf_counter() - self._begin, self._following.live, self._phase))
        if len(self._points) > MOST_POINTS:
            self._points = thinned(self._points, MOST_POINTS // 10)

    def _read_allocator(self) -> None:
        """Note the peak of the allocator since the phase began, and let it begin anew."""
        if self._allocator is not None:
            peak = torch.cuda.max_memory_allocated(self._device)
            self._allocator[self._phase] = max(self._allocator.get(self._phase, 0), peak)
            torch.cuda.reset_peak_memory_stats(self._device)


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` of the points: the ends, and the highest and lowest of each stretch between.

    >>> thinned([(0.0, 1, "a"), (1.0, 9, "a"), (2.0, 5, "a"), (3.0, 0, "a"), (4.0, 2, "a")], 4)
    [(0.0, 1, 'a'), (1.0, 9, 'a'), (3.0, 0, 'a'), (4.0, 2, 'a')]
    """
    if len(points) <= limit:
        return list(points)
    inner = range(1, len(points) - 1)
    stretch = -(-len(inner) // max((limit - 2) // 2, 1))
    chosen = {0, len(points) - 1}
    for first in inner[::stretch]:
        part = range(first, min(first + stretch, len(points) - 1))
        chosen |= {max(part, key=lambda i: points[i][1]), min(part, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(chosen)]
