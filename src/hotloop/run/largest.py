"""`largest_batch`: the largest batch that fits and the fastest one, by real steps that are undone."""

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, MutableMapping, Sized
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hotloop._torch import DispatchMode
from hotloop.data.origin import check_loader, check_readable_again
from hotloop.device.backend import backend_of
from hotloop.device.clock import Clock, synchronize
from hotloop.errors import BadArgument
from hotloop.memory.micro_batches import rows_of
from hotloop.memory.oom import clear, is_out_of_memory
from hotloop.memory.storages import Following, live_tensors
from hotloop.memory.usage import usage
from hotloop.objective.objectives import items_in
from hotloop.placement import move
from hotloop.printing.text import count, duration, plural, size
from hotloop.records import Record
from hotloop.step.training import TrainingStep
from hotloop.tune.scratch import Scratch, scratch
from hotloop.tune.subject import Subject
from hotloop.values.tree import tensors_of

ENOUGH = 0.98  # of the best throughput: a smaller batch that has it is as good
SAFE = 0.8  # share of a machine's free memory that a search may fill: beyond its end, a CPU takes others down
UPDATES = 2  # that show the peak: in the first the optimizer allocates, in the second that is there from the start
ATTEMPTS = 20  # at them, where the fp16 scaler skips some
TIMED = 0.2  # seconds of steps that are timed
MOST_TIMED = 10  # such steps
ENDLESS = 2**40  # items, where nothing else bounds the search

Reason = Literal["memory", "limit", "data", "time"]


@dataclass(frozen=True)
class Try(Record):
    """A trial of a batch size."""

    items: int
    seconds_per_item: float | None  # None where it was not timed
    peak: int | None  # bytes, of everything on the device; None where it did not run to the end
    fits: bool


@dataclass(frozen=True)
class Largest(Record):
    """The largest batch that fits, and the smallest one that is as fast as any, within 2%."""

    items: int  # 0 where not even one fits
    best: int
    tried: tuple[Try, ...]
    memory: int | None  # bytes that the step could use
    reason: Reason  # what ended the search
    seconds: float  # that it took

    def __str__(self) -> str:
        ends = {
            "memory": f"{plural(self.items, 'item')} fit, {self.items + 1:,} do not",
            "limit": f"{plural(self.items, 'item')} fit, which was the limit",
            "data": f"{plural(self.items, 'item')} fit, which is the whole dataset",
            "time": f"at least {plural(self.items, 'item')} fit: the time ran out during the search",
        }
        first = ends[self.reason] if self.items or self.reason != "memory" else "not even one item fits"
        best = f"; fastest with {self.best:,}" if self.best else ""
        lines = [f"{first}{best} (found in {duration(self.seconds)}, with {size(self.memory)} to use)"]
        lines.append(f"{'items':>12}  {'items/s':>12}  {'peak':>12}")
        for each in sorted(self.tried, key=lambda each: each.items):
            speed = count(1 / each.seconds_per_item) if each.seconds_per_item else ""
            peak = "does not fit" if not each.fits else size(each.peak)
            lines.append(f"{each.items:>12,}  {speed:>12}  {peak:>12}")
        return "\n".join(lines)


def largest_batch(
    subject: Subject, data: Any, *, limit: int | None = None, seconds: float = 30.0, transform: Any = None
) -> Largest:
    """Find the largest batch that a step of `subject` can take, and the one with the best throughput.

    `data` is a loader or a batch; its rows, repeated, make batches of any size, and `transform` changes them on the
    device. Each size runs whole steps (forward, backward, clipping, update) from the same state, in an empty allocator.
    Neither compiled nor captured: a compiler would begin anew for every size. Model, optimizers, gradients, rng
    states and the order of the data are left as they were, to the bit. After `seconds` the search says what it knows.
    """
    for name, value in (("limit", limit), ("seconds", seconds)):
        if value is not None and not value > 0:
            raise BadArgument(f"{name}={value}", fix="give a number above 0")
    with scratch(subject, {"": data}, transform) as space:
        batch, length = _example(data)
        space.rewind_rng()
        bound = min(ENDLESS if limit is None else limit, length or ENDLESS)
        search = _Search(space, move(batch, "cpu"), transform, seconds)
        return search.run(bound, "data" if bound == length and bound != limit else "limit")


def climb(fits: Callable[[int], bool | None], start: int, bound: int) -> tuple[int, int]:
    """The largest number that fits and the smallest that does not, by doubling and then halving what is between.

    It ends early where `fits` says None. Above `bound` nothing is asked.

    >>> climb(lambda n: n <= 1000, start=64, bound=10**6)
    (1000, 1001)
    """
    low, high = 0, bound + 1
    number = min(start, bound)
    while high - low > 1:
        said = fits(number)
        if said is None:
            break
        low, high = (number, high) if said else (low, number)
        number = min(2 * number, bound) if high > bound else (low + high) // 2
    return low, high


class _Search:
    """Tries sizes one after another, within a time."""

    def __init__(self, space: Scratch, batch: Any, transform: Any, seconds: float) -> None:
        self._space, self._batch, self._transform = space, batch, transform
        self._device, self._is_host = space.subject.device, space.subject.backend.is_host
        self._began = time.perf_counter()
        self._end = self._began + seconds
        self._items = items_in(batch)
        self._tried: list[Try] = []
        self._last = (0, 0.0)  # the items and the seconds of the last try that fitted
        clear(self._device)
        self._memory = _memory(self._device)

    def run(self, bound: int, bounded_by: Reason) -> Largest:
        # Where too much memory is an error, the batch at hand is a good start; where it is a disaster, a small one is.
        start = min(self._items, 2) if self._is_host else self._items
        low, high = climb(self._fits, start, bound)
        timed = [each for each in self._tried if each.seconds_per_item]
        quickest = min((each.seconds_per_item or 0.0 for each in timed), default=0.0)
        good = [each.items for each in timed if quickest >= ENOUGH * (each.seconds_per_item or 0.0)]
        reason: Reason = "time" if high - low > 1 else bounded_by if high > bound else "memory"
        seconds = time.perf_counter() - self._began
        return Largest(low, min(good, default=low), tuple(self._tried), self._memory, reason, seconds)

    def _fits(self, items: int) -> bool | None:
        before, took = self._last
        begin = time.perf_counter()
        if before and begin + took * max(items / before, 1) > self._end:
            return None
        if self._is_host and self._expected(items) > (self._memory or 0):
            self._tried.append(Try(items, None, None, False))
            return False
        found = Try(items, None, None, False)
        try:
            found = self._try(items)
        except Exception as error:
            if not is_out_of_memory(error):
                error.add_note(f"while a batch of {plural(items, 'item')} was tried; limit=… bounds the search")
                raise
        # Outside of `except`: the error holds the frames of the step, and they hold its tensors.
        clear(self._device)
        self._tried.append(found)
        if found.fits:
            self._last = items, time.perf_counter() - begin
        return found.fits

    def _try(self, items: int) -> Try:
        batch = move(rows_of(self._batch, self._items, [n % self._items for n in range(items)]), self._device)
        if self._transform is not None:
            batch = self._transform(batch)
        with self._space.eager_step(self._space.subject.plan) as step:
            peak = _peak_of(lambda: _warm_optimizer(step, batch), self._device)
            return Try(items, time_of(step, batch) / items, peak, fits=True)

    def _expected(self, items: int) -> float:
        """The expected peak at a size, from the two nearest measured ones."""
        known = sorted((each.items, each.peak) for each in self._tried if each.peak is not None)
        if not known:
            return 0.0
        near = sorted(known, key=lambda pair: abs(pair[0] - items))[:2]
        if len(near) == 1:
            return near[0][1] * items / near[0][0]
        (a, low), (b, high) = sorted(near)
        return max(high, high + (high - low) / (b - a) * (items - b)) if items > b else float(high)


def _example(data: Any) -> tuple[Any, int | None]:
    """A batch, and the length of its dataset where there is one."""
    in_a_row = isinstance(data, list | tuple) and any(isinstance(value, Tensor) for value in data)
    if in_a_row or isinstance(data, Tensor | Mapping) or dataclasses.is_dataclass(data):
        return data, None
    check_loader(data)
    check_readable_again(data, fix="give a DataLoader, a list of batches, or one batch")
    first = next(iter(data), None)
    if first is None:
        raise BadArgument("the loader gave no batch", fix="give a loader that is not empty")
    sample = getattr(data, "dataset", None)
    return first, len(sample) if isinstance(data, DataLoader) and isinstance(sample, Sized) else None


def _memory(device: torch.device) -> int | None:
    """Bytes available to tensors in all: allocated now, and free."""
    backend = backend_of(device)
    if backend.is_host:
        free = usage(device).free
        return None if free is None else _PeakBytes(device).highest + int(SAFE * free)
    allocated, room = backend.memory_allocated(), backend.room()
    return None if allocated is None or room is None else allocated + room


def _warm_optimizer(step: TrainingStep, batch: Any) -> None:
    """Train until the optimizer has its full state, and one step more."""
    for _ in range(ATTEMPTS):
        step(_shallow_copy(batch))
        if step.counts.steps >= UPDATES:
            return


def time_of(step: TrainingStep, batch: Any) -> float:
    """Seconds of a step on a batch: the median of a few."""
    times: list[float] = []
    while len(times) < MOST_TIMED and sum(times) < TIMED:
        synchronize(step.device)
        given = _shallow_copy(batch)
        clock = Clock(step.device)
        step(given)
        times.append(clock.seconds())
    return statistics.median(times)


def _shallow_copy(batch: Any) -> Any:
    """A batch in a container of its own: some objectives pop their labels."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | list) else batch


def _peak_of(call: Callable[[], object], device: torch.device) -> int | None:
    """Run something; returns the peak of allocated bytes on the device, None where that is unknown."""
    backend = backend_of(device)
    if backend.is_host:
        peak = _PeakBytes(device)
        with peak:
            call()
        return peak.highest
    backend.reset_peak_memory_stats()
    call()
    return backend.max_memory_allocated()


class _PeakBytes(DispatchMode):
    """Peak bytes of tensors on a CPU, counted as `track` does but without its hooks.

    PyTorch cannot free a graph whose backward pass never comes once a hook holds its tensors, and steps may fail here.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._following = Following(device, lambda key, size: None)
        for tensor in live_tensors():
            self._following.see(tensor)
        self.highest = self._following.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of((result, args, kwargs)):
            self._following.see(tensor)
        self.highest = max(self.highest, self._following.live)
        return result
