"""The memory of the simulated device: when each piece comes and goes."""

import weakref
from typing import Any

from torch import Tensor

from hotloop.apps.simulate._torch import device_of, storage_id
from hotloop.apps.simulate.telling import Teller


class Storages:
    """Tells listeners of every memory that comes and goes, by weak references on PyTorch's own storages."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._alive: dict[int, tuple[weakref.ref[Any], int, str]] = {}  # by address: itself, its key, what it is
        self._next = 0

    def born(self, tensor: Tensor, kind: str) -> None:
        """Notice the memory of a new tensor; a view has none of its own."""
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        held = self._alive.get(address)
        if held is not None and held[0]() is storage:
            return
        self._next += 1
        key = self._next
        device = device_of(tensor).index or 0
        self._teller.allocated(key, storage.nbytes(), kind, device)  # may find that there is no room
        self._alive[address] = (weakref.ref(storage, lambda _: self._gone(address, key)), key, kind)

    def resized(self, tensor: Tensor, kind: str) -> None:
        """A storage has another size now: as the allocator sees it, an old block went and a new one came."""
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        held = self._alive.pop(address, None)
        if held is not None:
            self._teller.freed(held[1])
        self.born(tensor, kind)

    def name(self, tensor: Tensor, kind: str) -> None:
        """A memory turned out to be something else."""
        held = self._alive.get(storage_id(tensor))
        if held is not None and held[2] != kind:
            self._alive[storage_id(tensor)] = (held[0], held[1], kind)
            self._teller.named(held[1], kind)

    def kind(self, tensor: Tensor) -> str:
        """What a memory is; nothing where it is not known."""
        held = self._alive.get(storage_id(tensor))
        return held[2] if held is not None else ""

    def _gone(self, address: int, key: int) -> None:
        held = self._alive.get(address)
        if held is None or held[1] != key:
            return
        del self._alive[address]
        self._teller.freed(key)
