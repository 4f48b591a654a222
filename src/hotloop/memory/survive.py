"""`Survivor`: a pass over a batch that is taken back and repeated in smaller pieces when memory runs out."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from hotloop.errors import MemoryWarning
from hotloop.memory.fragmentation import Fragmented, mend
from hotloop.memory.oom import Failure, clear, does_not_fit, is_out_of_memory, room
from hotloop.memory.pieces import bounds
from hotloop.memory.portion import Portion
from hotloop.memory.rewind import Rewind
from hotloop.memory.usage import Held, holdings

T = TypeVar("T")


def nothing() -> None:
    """For work that leaves nothing to take back."""


class Survivor:
    """Repeats what ran out of memory: everything that the attempt changed is put back, then smaller pieces follow.

    `relieve` is asked where a single item does not fit: it changes something that saves memory and says whether it
    did. `told` hears of each failure: the size that failed, and the one that follows.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        *,
        most: int | None = None,
        relieve: Callable[[], bool] = lambda: False,
        told: Callable[[int, int], None] = lambda failed, follows: None,
    ) -> None:
        self.device = device
        self.portion = Portion(most, partial(room, device))
        self.rewind = Rewind(modules, device)
        self.optimizers: Sequence[Optimizer] = ()  # whose state is named where nothing fits
        self.has_recordings: Callable[[], bool] = lambda: False  # which `undo` lets go of: their memory is no hole
        self.mended: Fragmented | None = None  # why expandable segments were turned on; None where they were not
        self._modules = modules
        self._relieve, self._told = relieve, told

    def run(self, items: int, attempt: Callable[[int], T], undo: Callable[[], None] = nothing) -> T:
        """`attempt(size)`, with as many of the items at once as fit.

        `undo` takes back what an attempt leaves besides buffers and random states, such as gradients.
        """
        while True:
            size = self.portion.of(items)
            self.rewind.note()
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

    def each(self, items: int, work: Callable[[slice], None], undo: Callable[[], None] = nothing) -> None:
        """`work(rows)` for all the items, as many at once as fit; what is done is not done again."""

        def attempt(size: int) -> int:
            stop = items if size >= items - done else done + next(bounds(items - done, size))[1]
            work(slice(done, stop))
            return stop

        done = 0
        while True:
            done = self.run(items - done, attempt, undo)
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

    def shrink(self, size: int, failure: Failure, held: Held | None = None) -> None:
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

    def _held(self) -> Held:
        return holdings(nn.ModuleList(self._modules), self.optimizers).on(self.device)
