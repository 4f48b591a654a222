"""The memory of the simulated device: when each piece comes and goes, and which of it has known values."""

import weakref
from typing import Any

import torch
from torch import Tensor

from hotloop.simulate.telling import Teller

KNOWN_LIMIT = 1 << 20  # bytes up to which values that came from the host are kept


class Storages:
    """Tells listeners of every memory that comes and goes, by weak references on PyTorch's own storages.

    Values are known for memory that came from the host or was filled with one number, until something is written
    to it: so a label, a seed or the scale of a `GradScaler` that comes back to the host is what it was.
    """

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._alive: dict[int, tuple[weakref.ref[Any], int, str]] = {}  # by address: itself, its key, what it is
        self._known: dict[int, Tensor] = {}
        self._next = 0

    def born(self, tensor: Tensor, kind: str) -> None:
        """Notice the memory of a new tensor; a view has none of its own."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        held = self._alive.get(address)
        if held is not None and held[0]() is storage:
            return
        self._next += 1
        key = self._next
        self._teller.allocated(key, storage.nbytes(), kind)  # may find that there is no room
        self._alive[address] = (weakref.ref(storage, lambda _: self._gone(address, key)), key, kind)

    def resized(self, tensor: Tensor, kind: str) -> None:
        """A storage has another size now: as the allocator sees it, an old block went and a new one came."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        held = self._alive.pop(address, None)
        if held is not None:
            self._teller.freed(held[1])
        self.born(tensor, kind)

    def name(self, tensor: Tensor, kind: str) -> None:
        """A memory turned out to be something else."""
        held = self._alive.get(tensor.untyped_storage()._cdata)
        if held is not None and held[2] != kind:
            self._alive[tensor.untyped_storage()._cdata] = (held[0], held[1], kind)
            self._teller.named(held[1], kind)

    def know(self, tensor: Tensor, values: Tensor) -> None:
        """Remember what a tensor holds."""
        size = tensor.untyped_storage().nbytes()
        if size > KNOWN_LIMIT or size != values.untyped_storage().nbytes() or values.stride() != tensor.stride():
            return
        self._known[tensor.untyped_storage()._cdata] = values.detach().clone(memory_format=torch.preserve_format)

    def forget(self, tensor: Tensor) -> None:
        """Something unknown was written to it."""
        if self._known:
            self._known.pop(tensor.untyped_storage()._cdata, None)

    def values(self, tensor: Tensor) -> Tensor | None:
        """What a tensor holds, where that is known."""
        if not self._known:
            return None
        whole = self._known.get(tensor.untyped_storage()._cdata)
        if whole is None or whole.dtype != tensor.dtype:
            return None
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _gone(self, address: int, key: int) -> None:
        held = self._alive.get(address)
        if held is None or held[1] != key:
            return
        del self._alive[address]
        self._known.pop(address, None)
        self._teller.freed(key)
