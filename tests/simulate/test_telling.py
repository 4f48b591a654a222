"""Listeners hear of one event at a time, although the garbage collector frees memory at any moment."""

import pytest

from hotloop.apps.simulate.events import Listener, Operation
from hotloop.apps.simulate.telling import Teller


class Interrupted(Listener):
    """Memory 1 is freed while it hears of other events."""

    def __init__(self) -> None:
        self.teller = Teller([self])
        self.heard: list[str] = []
        self._owes = True

    def _hear(self, what: str) -> None:
        self.heard.append(f"{what} begins")
        if self._owes:
            self._owes = False
            self.teller.freed(1)
        self.heard.append(f"{what} ends")

    def allocated(self, key: int, size: int, kind: str) -> None:
        self._hear(f"allocated {key}")
        if size < 0:
            raise MemoryError

    def freed(self, key: int) -> None:
        self._hear(f"freed {key}")

    def after(self, operation: Operation) -> None:
        self._hear(operation.name)


def test_memory_that_is_freed_during_an_event_is_freed_after_it() -> None:
    listener = Interrupted()
    listener.teller.after(Operation("aten.mm.default", (), ()))
    listener.teller.freed(2)
    assert listener.heard == [
        *("aten.mm.default begins", "aten.mm.default ends", "freed 1 begins", "freed 1 ends"),
        *("freed 2 begins", "freed 2 ends"),
    ]


def test_memory_that_is_freed_while_other_memory_is() -> None:
    listener = Interrupted()
    listener.teller.freed(2)
    assert listener.heard == ["freed 2 begins", "freed 2 ends", "freed 1 begins", "freed 1 ends"]


def test_memory_that_is_freed_while_there_is_no_room() -> None:
    listener = Interrupted()
    with pytest.raises(MemoryError):
        listener.teller.allocated(2, -1, "temporary")
    assert listener.heard == ["allocated 2 begins", "allocated 2 ends", "freed 1 begins", "freed 1 ends"]
    listener.teller.freed(3)
    assert listener.heard[-1] == "freed 3 ends"
