"""`Survivor`: a pass over a batch that is taken back and repeated in smaller pieces when memory runs out."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from hotloop.errors import DoesNotFit
from hotloop.memory.oom import clear, is_out_of_memory, room
from hotloop.memory.portion import Portion
from hotloop.memory.rewind import Rewind

T = TypeVar("T")
ATTEMPTS = 4  # at work that cannot be done in smaller pieces


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
        self._relieve, self._told = relieve, told

    def run(self, items: int, attempt: Callable[[int], T], undo: Callable[[], None]) -> T:
        """`attempt(size)`, with as many of the items at once as fit.

        `undo` takes back what an attempt leaves besides buffers and random states, such as gradients.
        """
        while True:
            size = self.portion.of(items)
            surely(self.rewind.note, self.device)
            said = ""
            try:
                result = attempt(size)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                said = str(error)  # alone: the error itself holds the frames, and they hold the tensors
            else:
                self.rewind.settle()
                return result
            self.lost(size, undo, said)

    def lost(self, size: int, undo: Callable[[], None], said: str) -> None:
        """Memory ran out in a pass with so many items at once: put everything back and choose what follows."""
        self.rewind.put()
        undo()
        clear(self.device)
        if size <= 1 and not self._relieve():
            raise DoesNotFit(f"a single item does not fit into the memory of {self.device}\n  {_first_line(said)}")
        self.portion.failed(size)
        self._told(size, self.portion.of(size))


def surely(call: Callable[[], T], device: torch.device) -> T:
    """A call that changes nothing before it succeeds; where memory runs out, again after unused memory was released."""
    for _ in range(ATTEMPTS - 1):
        try:
            return call()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        clear(device)
    return call()


def _first_line(said: str) -> str:
    return (said.strip().splitlines() or ["out of memory"])[0]
