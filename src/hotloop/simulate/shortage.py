"""What is raised where a simulated GPU runs out of memory: PyTorch's own error, with the figures."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Self

import torch

from hotloop.records import Record
from hotloop.simulate.events import Operation, Place
from hotloop.simulate.places import here
from hotloop.text import printable, size


@dataclass(frozen=True)
class Shortage(Record):
    """Where memory ran out, and how things stood."""

    asked: int  # bytes of the segment that could not be had
    total: int  # of the card
    free: int
    allocated: int
    reserved: int
    context: int
    cap: int | None
    file: str
    line: int  # 0 where it is not known
    function: str
    module: str

    @classmethod
    def during(cls, operation: Operation | None, **figures: Any) -> Self:
        """With the place of the operation that asked; `torch.empty` is none."""
        place = (operation and operation.place) or here() or Place("", 0)
        module = operation.module if operation else ""
        return cls(**figures, file=place.file, line=place.line, function=place.function, module=module)

    def words(self) -> str:
        """The same in a sentence for people."""
        where = f" at {printable(PurePath(self.file).name)}:{self.line}" if self.line else ""
        found = self.free if self.cap is None else min(self.free, max(0, self.cap - self.reserved))
        return f"memory runs out{where}: {size(self.asked)} are asked for where {size(found)} can be had"

    def __str__(self) -> str:
        """In the words of PyTorch, since scripts read them."""
        allowed = "" if self.cap is None else f"{_said(self.cap)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {_said(self.asked)}. GPU 0 has a total capacity of"
            f" {_said(self.total)} of which {_said(self.free)} is free. Including non-PyTorch memory, this process has"
            f" {_said(self.reserved + self.context)} memory in use. {allowed}Of the allocated memory"
            f" {_said(self.allocated)} is allocated by PyTorch, and {_said(self.reserved - self.allocated)} is reserved"
            " by PyTorch but unallocated. (simulated)"
        )


class SimulatedOutOfMemory(torch.OutOfMemoryError):
    """What a real GPU would have raised; `shortage` has the figures."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(str(shortage))
        self.shortage = shortage


def _said(amount: int) -> str:
    """Bytes in the way in which PyTorch writes them.

    >>> _said(2**30), _said(20 * 2**20), _said(512)
    ('1.00 GiB', '20.00 MiB', '512 bytes')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if amount >= unit:
            return f"{amount / unit:.2f} {name}"
    return f"{amount} bytes"
