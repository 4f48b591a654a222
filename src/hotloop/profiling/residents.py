"""`Residents`: what is alive on the device over a step, told apart by what it is for."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotloop._torch import storage_id
from hotloop.memory.storages import Following, live_tensors, storages_of
from hotloop.profiling.profile_record import CATEGORIES, MemorySample
from hotloop.values.tree import tensors_in, tensors_of

SAMPLES = 240  # that a profile keeps


@dataclass
class _Change:
    """Memory that came or went."""

    seconds: float
    phase: str
    resident: int
    bytes: int


class Residents:
    """Follows the memory on one device.

    What something is for is often known only later (a gradient is one once it lies in `.grad`), so the changes are
    kept, and are told apart at the end.
    """

    def __init__(self, device: torch.device, optimizers: Callable[[], Iterable[Optimizer]]) -> None:
        self._optimizers = optimizers
        self._changes: list[_Change] = []
        self._numbers: dict[int, int] = {}  # of the memory that is alive
        self._sizes: list[int] = []
        self._categories: dict[int, str] = {}
        self._phase = ""  # until the first operation
        self._closed = False
        self._following = Following(device, self._end)
        self._begin = time.perf_counter()
        for tensor in live_tensors():
            self._see(tensor, "other")
        self._recognise()
        for change in self._changes:
            change.seconds = 0.0  # it was all there before
        self._begin = time.perf_counter()

    def note(self, tensors: Any, phase: str) -> None:
        """See what an operation was given and what it made."""
        self._phase = phase
        made_for = "activations" if phase == "forward" and torch.is_grad_enabled() else "other"
        *given, result = tensors
        for tensor in tensors_of(given):  # what nobody saw being made came from outside, such as a batch of a worker
            self._see(tensor, "other")
        for tensor in tensors_of(result):
            self._see(tensor, made_for)

    def close(self) -> None:
        """Tell apart what is alive now, and follow nothing any more."""
        if not self._closed:
            self._recognise()
            self._closed = True
            self._following.stop()

    def samples(self) -> tuple[MemorySample, ...]:
        """The bytes of each category over time, thinned so that peaks stay."""
        held = dict.fromkeys(CATEGORIES, 0)
        rows: list[tuple[float, str, tuple[int, ...]]] = []
        for change in self._changes:
            held[self._categories.get(change.resident, "other")] += change.bytes
            rows.append((change.seconds, change.phase, tuple(held.values())))
        start = next((i for i, row in enumerate(rows) if row[0] > 0), len(rows)) - 1
        rows = rows[max(start, 0) :]  # what was there before is one sample
        places = thinned([sum(held) for _, _, held in rows], SAMPLES)
        return tuple(MemorySample(rows[i][0], rows[i][1], *rows[i][2]) for i in places)

    def _see(self, tensor: Tensor, category: str) -> None:
        for key, bytes_ in self._following.see(tensor):
            number = self._numbers[key] = len(self._sizes)
            self._sizes.append(bytes_)
            self._categories[number] = category
            self._changes.append(_Change(time.perf_counter() - self._begin, self._phase, number, bytes_))

    def _end(self, key: int, _: int) -> None:
        number = self._numbers.pop(key, None)
        if number is not None and not self._closed:
            now = time.perf_counter() - self._begin
            self._changes.append(_Change(now, self._phase, number, -self._sizes[number]))

    def _recognise(self) -> None:
        """What belongs to the optimizers is known by where it lies."""
        for optimizer in self._optimizers():
            learned = [p for group in optimizer.param_groups for p in group["params"]]
            self._are("optimizer", (t for state in optimizer.state.values() for _, t in tensors_in(state)))
            self._are("gradients", (p.grad for p in learned if p.grad is not None))
            self._are("parameters", learned)

    def _are(self, category: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for storage in storages_of(tensor):
                number = self._numbers.get(storage_id(storage))
                if number is not None:
                    self._categories[number] = category


def thinned(heights: Sequence[int], limit: int) -> list[int]:
    """The places of at most `limit` of the heights: the ends, and the highest and lowest of each stretch between.

    >>> thinned([1, 9, 5, 0, 2], 4)
    [0, 1, 3, 4]
    """
    if len(heights) <= limit:
        return list(range(len(heights)))
    inner = range(1, len(heights) - 1)
    stretch = -(-len(inner) // max((limit - 2) // 2, 1))
    chosen = {0, len(heights) - 1}
    for first in inner[::stretch]:
        part = range(first, min(first + stretch, len(heights) - 1))
        chosen |= {max(part, key=heights.__getitem__), min(part, key=heights.__getitem__)}
    return sorted(chosen)
