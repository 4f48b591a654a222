"""`Survivor`: a pass over a batch that is taken back and repeated in smaller pieces when memory runs out."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from hotloop.errors import MemoryWarning
from hotloop.memory.fragmentation import Fragmented, mend
from hotloop.memory.oom import Failure, clear, does_not_fit, is_out_of_memory, room
from hotloop.memory.pieces import bounds
from hotloop.memory.portion import Portion
from hotloop.memory.rewind import Rewind
from hotloop.memory.usage import DeviceHoldings, holdings
from hotloop.text import shorten

T = TypeVar("T")


def nothing() -> None:
    """For work that leaves nothing to take back."""


def tell_of_effects(names: list[str]) -> None:
    """Say what a step that was repeated has changed twice, or once for each micro-batch."""
    if names:
        warnings.warn(
            f"memory ran out and the step was repeated; {shorten(names, 4)}: your code changes that in each call, so it"
            " was changed by the failed attempt too, and once for each micro-batch",
            MemoryWarning,
            stacklevel=3,
        )


class Survivor:
    """Repeats what ran out of memory: everything that the attempt changed is put back, then smaller pieces follow.

    `relieve` is asked where a single item does not fit: it changes something that saves memory and says whether it
    did. `told` hears of each failure: the size that failed, and the one that follows. `witness` is called before a
    repetition and what it returns after it: names of what the person's code changed and `Rewind` cannot restore.
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
    ) -> None:
        self.device = device
        self.portion = Portion(most, partial(room, device))
        self.rewind = Rewind(modules, device)
        self.optimizers: Sequence[Optimizer] = ()  # whose state is named where nothing fits
        self.has_recordings: Callable[[], bool] = lambda: False  # which `undo` lets go of: their memory is no hole
        self.mended: Fragmented | None = None  # why expandable segments were turned on; None where they were not
        self.modules = modules
        self._repeating = False
        self._named: set[str] = set()  # what was said to change twice
        self._relieve, self._told, self._witness = relieve, told, witness

    def run(self, items: int, attempt: Callable[[int], T], undo: Callable[[], None] = nothing, batch: Any = None) -> T:
        """`attempt(size)`, with as many of the items at once as fit.

        `undo` takes back what an attempt leaves besides buffers, rng states and the batch, such as gradients.
        """
        size = self.portion.of(items)
        self.rewind.note(batch)
        try:
            result = attempt(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = Failure.of(error, self.device)
        else:
            self.rewind.settle()
            return result
        self.lost(size, undo, failure)
        return self.repeated(partial(self.run, items, attempt, undo, batch))

    def repeated(self, again: Callable[[], T]) -> T:
        """The repetition of a pass that failed; what it changes for a second time is named."""
        if self._repeating:
            return again()
        self._repeating = True
        changed = self._witness()
        try:
            result = again()
        finally:
            self._repeating = False
        names = [name for name in changed() if name not in self._named]
        self._named.update(names)
        tell_of_effects(names)
        return result

    def each(
        self, items: int, work: Callable[[slice], None], undo: Callable[[], None] = nothing, batch: Any = None
    ) -> None:
        """`work(rows)` for all the items, as many at once as fit; what is done is not done again."""

        def attempt(size: int) -> int:
            stop = items if size >= items - done else done + next(bounds(items - done, size))[1]
            work(slice(done, stop))
            return stop

        done = 0
        while True:
            done = self.run(items - done, attempt, undo, batch)
            self.portion.went_well()
            if done >= items:
                return

    def lost(self, size: int, undo: Callable[[], None], failure: Failure) -> None:
        """Memory ran out in a pass with so many items at once: put everything back and choose what follows."""
        held = self._held() if size <= 1 else None  # while the gradients are there
        fragmented = None if self.has_recordings() else failure.fragmented
        self.rewind.put()
        undo()
        if fragmented is None or not self._mend(fragmented):
            self.shrink(size, failure, held)

    def shrink(self, size: int, failure: Failure, held: DeviceHoldings | None = None) -> None:
        """Choose what follows on a failure that has left nothing to put back."""
        clear(self.device)
        if size <= 1 and not self._relieve():
            raise does_not_fit(failure, held or self._held(), self.device)
        self.portion.failed(size)
        self._told(size, self.portion.of(size))

    def _mend(self, fragmented: Fragmented) -> bool:
        """Make memory that is free in pieces usable; whether the same pass is worth another attempt."""
        clear(self.device)
        if not mend(fragmented, self.device):
            return False
        self.mended = fragmented
        self.portion.same_again()
        warnings.warn(f"{fragmented}; expandable segments are on now", MemoryWarning, stacklevel=2)
        return True

    def _held(self) -> DeviceHoldings:
        return holdings(nn.ModuleList(self.modules), self.optimizers).on(self.device)
