"""`OomRetry`: restores and repeats a call in smaller micro-batches when memory runs out."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from hotloop.errors import MemoryWarning
from hotloop.memory.fragmentation import Fragmented, mend
from hotloop.memory.micro_batches import bounds
from hotloop.memory.oom import Failure, clear, does_not_fit, is_out_of_memory
from hotloop.memory.usage import DeviceHoldings, holdings
from hotloop.printing.text import shorten
from hotloop.step.portion import Portion
from hotloop.values.snapshot import PassSnapshot

T = TypeVar("T")


def nothing() -> None:
    """The `undo` of a call that leaves nothing to undo."""


class OutOfMemory:
    """The state of OOM retry: the size of micro-batches, and a snapshot of what a pass changes.

    `relieve` is called where a single item does not fit: it changes something that saves memory and says whether it
    did. `told` hears of each failure: the size that failed, and the one that follows. `witness` is called before a
    repetition and what it returns after it: names of what the person's code changed and a snapshot cannot restore.
    `grows`: micro-batches that were made smaller are made larger again.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        *,
        most: int | None = None,
        relieve: Callable[[], bool] = lambda: False,
        told: Callable[[int, int], None] = lambda failed, follows: None,
        witness: Callable[[], Callable[[], list[str]]] = lambda: list,
        grows: bool = True,
    ) -> None:
        self.device = device
        self.modules = modules
        self.portion = Portion(most, grows=grows)
        self.snapshot = PassSnapshot(modules, device)
        self.optimizers: Sequence[Optimizer] = ()  # whose state is named where nothing fits
        self.has_captures: Callable[[], bool] = lambda: False  # which give way: their memory is no hole
        self.give_way: Callable[[], None] = nothing  # frees memory that a repetition does not need
        self.mended: Fragmented | None = None  # why expandable segments were turned on; None where they were not
        self._is_repeating = False
        self._named: set[str] = set()  # what was said to change twice
        self._relieve, self._told, self._witness = relieve, told, witness

    def serve(
        self, optimizers: Sequence[Optimizer], has_captures: Callable[[], bool], give_way: Callable[[], None]
    ) -> None:
        """Repeat the batches of a step that has these optimizers; `give_way` frees memory, such as that of captures."""
        self.optimizers, self.has_captures, self.give_way = optimizers, has_captures, give_way
        self.snapshot.groups = lambda: [group for optimizer in optimizers for group in optimizer.param_groups]

    def failed(self, size: int, undo: Callable[[], None], failure: Failure) -> None:
        """Restore everything after a pass with so many items ran out of memory, and choose the next size."""
        held = self._held() if size <= 1 else None  # while the gradients are there
        fragmented = None if self.has_captures() else failure.fragmented
        self.snapshot.restore()
        undo()
        self.give_way()
        if fragmented is None or not self._mend(fragmented):
            self.shrink(size, failure, held)

    def shrink(self, size: int, failure: Failure, held: DeviceHoldings | None = None) -> None:
        """Choose the next size after a failure that left nothing to restore."""
        clear(self.device)
        if size <= 1 and not self._relieve():
            raise does_not_fit(failure, held or self._held(), self.device)
        self.portion.failed(size)
        self._told(size, self.portion.of(size))

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Context of a repeated pass; warns with the names of what the person's code changes a second time."""
        if self._is_repeating:
            yield
            return
        self._is_repeating = True
        changed = self._witness()
        try:
            yield
        finally:
            self._is_repeating = False
        if names := [name for name in changed() if name not in self._named]:
            self._named.update(names)
            warnings.warn(
                f"memory ran out and the step was repeated; {shorten(names, 4)}: your code changes that in each call,"
                " so it was changed by the failed attempt too, and once for each micro-batch",
                MemoryWarning,
                stacklevel=3,
            )

    def _mend(self, fragmented: Fragmented) -> bool:
        """Mend fragmentation; returns whether the same pass is worth another attempt."""
        clear(self.device)
        if not mend(fragmented, self.device):
            return False
        self.mended = fragmented
        self.portion.same_again()
        warnings.warn(f"{fragmented}; expandable segments are on now", MemoryWarning, stacklevel=2)
        return True

    def _held(self) -> DeviceHoldings:
        return holdings(nn.ModuleList(self.modules), self.optimizers).on(self.device)


class OomRetry(Generic[T]):
    """Calls a function of batch and size; where memory runs out, again with smaller micro-batches.

    `call(batch, size)` computes at most `size` items at once, None for all. `undo` restores what a failed call leaves
    besides buffers, rng states and the batch, such as gradients.
    """

    def __init__(
        self,
        call: Callable[[Any, int | None], T],
        memory: OutOfMemory,
        items_in: Callable[[Any], int],
        undo: Callable[[], None] = nothing,
        *,
        notes_batch: bool = True,
    ) -> None:
        self.call = call
        self._memory, self._items_in, self._undo, self._notes_batch = memory, items_in, undo, notes_batch

    def __call__(self, batch: Any) -> T:
        memory = self._memory
        snapshot, portion = memory.snapshot, memory.portion
        size = portion.limit if portion.limit is None else portion.size_for(self._items_in(batch))
        self._note(batch)
        try:
            result = self.call(batch, size)
        except BaseException as error:
            if not isinstance(error, Exception) or not is_out_of_memory(error):
                self._undo()
                raise
            failure = Failure.of(error, memory.device)
        else:
            if snapshot.is_looking:
                snapshot.learn()
            if portion.failures:
                portion.went_well()
            return result
        # Outside of `except`: the error holds the frames of the call, and they hold its tensors.
        memory.failed(size or self._items_in(batch), self._undo, failure)
        with memory.repeating():
            return self(batch)

    def _note(self, batch: Any) -> None:
        """Snapshot what the call may change; without the batch where memory has no room for its copy."""
        memory = self._memory
        try:
            return memory.snapshot.take(batch if self._notes_batch else None)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        memory.give_way()
        clear(memory.device)
        return memory.snapshot.take()


def in_rows(work: Callable[[slice], None], items: int, memory: OutOfMemory, undo: Callable[[], None] = nothing) -> None:
    """Call `work(rows)` for all items, as many at once as fit; finished rows are not repeated."""
    done = 0

    def some(left: int, size: int | None) -> int:
        stop = items if size is None else done + next(bounds(left, size))[1]
        work(slice(done, stop))
        return stop

    retry = OomRetry(some, memory, int, undo, notes_batch=False)
    while True:
        done = retry(items - done)
        if done >= items:
            return
