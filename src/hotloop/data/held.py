"""Large batches of a list, such as a whole graph or a whole table, stay on the device: they are the same in each epoch.

A change of one is noticed as `hotloop.data.on_device` says of a dataset, each time that it comes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotloop.data.on_device import all_tensors, some_bytes, writes
from hotloop.device.backend import backend_of
from hotloop.placement import move
from hotloop.values.tree import map_tensors, tensors_in

LARGE_BATCH = 4 << 20  # bytes of a batch: to look whether a smaller one has changed takes as long as to copy it
HELD_MEMORY_SHARE = 0.25  # of the memory that is free, for all of them


@dataclass
class _HeldBatch:
    """A batch, what was seen of it on the host, and its copy on the device from the second time on."""

    tensors: list[Tensor]  # held, so that no other can have their ids
    seen: list[Any]
    copy: Any = None


class HeldBatches:
    """Batches on a device; what comes again unchanged is not copied there again. There are as many as the list has."""

    def __init__(self, device: torch.device, most: int) -> None:
        self._device = device
        self._most = most
        self._held: dict[tuple[int, ...], _HeldBatch] = {}

    def moved(self, batch: Any) -> Any:
        """A batch on the device, which belongs to who gets it: a step may change it in place."""
        tensors = [tensor for _, tensor in tensors_in(batch)]
        if not all_tensors(batch) or not all(map(_is_plain, tensors)) or sum(t.nbytes for t in tensors) < LARGE_BATCH:
            return move(batch, self._device)
        key = tuple(map(id, tensors))
        seen = [each for tensor in tensors for each in (writes(tensor), some_bytes(tensor))]
        held = self._held.get(key)
        if held is None or held.seen != seen:
            if len(self._held) >= self._most and key not in self._held:
                self._held.clear()  # it has other batches than before
            self._held[key] = _HeldBatch(tensors, seen)
            return move(batch, self._device)
        if held.copy is None:
            if not self._has_room(tensors):
                return move(batch, self._device)
            held.copy = move(batch, self._device)
        return map_tensors(held.copy, Tensor.clone)

    def _has_room(self, tensors: list[Tensor]) -> bool:
        room = backend_of(self._device).room()
        if room is None:
            return True
        held = sum(t.nbytes for each in self._held.values() if each.copy is not None for _, t in tensors_in(each.copy))
        return held + sum(tensor.nbytes for tensor in tensors) <= HELD_MEMORY_SHARE * (room + held)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a copy of a tensor is all that there is to it."""
    is_dense = type(tensor) is Tensor and tensor.layout == torch.strided
    return is_dense and tensor.is_cpu and not tensor.requires_grad
