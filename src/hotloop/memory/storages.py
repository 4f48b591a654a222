"""The memory behind tensors: found once however many tensors share it, and followed to its end."""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hotloop._torch import inner_tensors, sparse_parts, storage_id


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory behind a tensor; of one that is made of several (sparse, nested, sharded), that of each part.

    >>> [storage.nbytes() for storage in storages_of(torch.zeros(2, 3))]
    [24]
    """
    if is_lazy(tensor):  # a weight whose shape the first batch decides: it has no memory yet
        return
    if (inner := inner_tensors(tensor)) is not None:
        parts = inner
    elif tensor.layout == torch.sparse_coo:
        parts = sparse_parts(tensor)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        try:
            yield tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # such as inside `torch.func`: it has no memory of its own
            return
        return
    for part in parts:
        yield from storages_of(part)


def live_tensors() -> list[Tensor]:
    """Every tensor that Python knows of, once garbage is collected; what only autograd keeps is not among them."""
    gc.collect()
    # By its type and not by `isinstance`, which asks the object itself and so wakes lazy ones.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


class Following:
    """The memory on one device that was seen and still lives, with its size.

    PyTorch keeps the Python object of a storage for as long as its memory lives, so a weak reference to it ends with
    the memory.
    """

    def __init__(self, device: torch.device, ended: Callable[[int, int], None]) -> None:
        self.live = 0  # bytes
        self._device = device
        self._ended = ended  # told the key and the bytes of what ends
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def see(self, tensor: Tensor) -> list[tuple[int, int]]:
        """The memory of the tensor that is new here, as keys and bytes; a change of size is noted."""
        new = []
        for storage in storages_of(tensor):
            if storage.device != self._device:
                continue
            key, now = storage_id(storage), storage.nbytes()
            before, watch = self._known.get(key, (0, None))
            if watch is None:
                watch = weakref.ref(storage, partial(self._end, key))
                new.append((key, now))
            self._known[key] = now, watch
            self.live += now - before
        return new

    def stop(self) -> None:
        """Follow nothing any more."""
        self._known.clear()

    def _end(self, key: int, _: object) -> None:
        size, _ = self._known.pop(key, (0, None))
        self.live -= size
        self._ended(key, size)
