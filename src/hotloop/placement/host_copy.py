"""`HostCopy`: numbers on their way from the device to the host, for which nothing waits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotloop.device.backend import backend_of

FEW_TENSORS = 32  # tensors that are copied one by one: for the first of them, no kernel need be loaded


class HostCopy:
    """Tensors of any shapes, as they are at this point of the device's stream; not copied yet where copies block.

    >>> HostCopy([torch.ones(2), torch.tensor(3)]).numbers().tolist()
    [1.0, 1.0, 3.0]
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._event: torch.Event | None = None
        if tensors and not tensors[0].is_cpu and (backend := backend_of(tensors[0].device)).non_blocking:
            self._tensors = [_pinned(tensors)]
            self._event = backend.new_event()
            self._event.record()

    def has_landed(self) -> bool:
        """Whether `numbers` would not wait for the device."""
        return self._event is None or self._event.query()

    def numbers(self) -> Any:
        """All of them in one array, as float64; waits until they are there."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        flat = [tensor.detach().reshape(-1).cpu().double().numpy() for tensor in self._tensors]
        return np.concatenate(flat) if flat else np.empty(0)


def in_one_row(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of any shapes as one, which has one dimension."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    if any(map(torch.Tensor.dim, tensors)):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    return torch.stack(tensors)  # type: ignore[arg-type]  # any sequence will do


def _pinned(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) > FEW_TENSORS:
        tensors = [in_one_row(tensors)]
    kinds = {tensor.dtype for tensor in tensors}
    sizes = [tensor.numel() for tensor in tensors]
    whole = torch.empty(sum(sizes), dtype=kinds.pop() if len(kinds) == 1 else torch.float64, pin_memory=True)
    for part, tensor in zip(whole.split(sizes), tensors, strict=True):
        part.copy_(tensor.detach().reshape(-1), non_blocking=True)
    return whole
