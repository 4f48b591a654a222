"""`release` gives memory back and says what is still held."""

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._torch import storage_id
from hotloop.memory.holders import holder_of
from hotloop.memory.storages import storages_of
from hotloop.memory.usage import Usage, usage
from hotloop.placement import tensors_in
from hotloop.printing.text import shorten, size
from hotloop.records import Record


@dataclass(frozen=True)
class Released(Record):
    """What a `release` gave back to the device, and what it could not."""

    before: Usage
    after: Usage
    given_back: int | None  # bytes of this process; None where the device does not tell
    held: int  # bytes in the tensors that were handed in, which live on
    holders: tuple[str, ...]  # what keeps them

    def __str__(self) -> str:
        lines = [f"{self.before.device}: {size(self.given_back)} given back"]
        if self.held:
            by = f" by {shorten(list(self.holders))}" if self.holders else ""
            lines.append(f"{size(self.held)} still held{by}; `del` those names first")
        return "\n".join([*lines, str(self.after)])


def release(*holders: Any, device: str | torch.device | None = None) -> Released:
    """Give memory that nothing needs back to the device: collect garbage, then empty the allocator's cache.

    Only what no name refers to can be given back, so `del` the names (model, optimizer, loss, output) before the call.
    What is handed in is not freed, which no function can do to its caller: it is looked at, and who keeps its tensors
    is said. The device is that of the first tensor handed in, else the accelerator, else the CPU. Not for the inside
    of a loop: the allocator uses its cache again at once, and asking the device for memory anew makes it wait.

    >>> release().held
    0
    """
    tensors = list(_tensors_in(holders))
    target = torch.device(device) if device is not None else _device_of(tensors)
    before = usage(target)
    gc.collect()
    if target.type == "cuda":
        torch.cuda.synchronize(target)  # blocks that other streams still use come back only when those are done
        torch.cuda.empty_cache()
    elif target.type == "mps":
        torch.mps.empty_cache()
    after = usage(target)
    on_device = [tensor for tensor in tensors if tensor.device.type == target.type]
    storages = {storage_id(s): s.nbytes() for tensor in on_device for s in storages_of(tensor)}
    return Released(before, after, _given_back(before, after), sum(storages.values()), _names(holders))


def _tensors_in(holders: Iterable[Any]) -> Iterable[Tensor]:
    for holder in holders:
        if isinstance(holder, nn.Module):
            for tensor in (*holder.parameters(), *holder.buffers()):
                yield from (tensor,) if tensor.grad is None else (tensor, tensor.grad)
        elif isinstance(holder, Optimizer):
            yield from (tensor for state in holder.state.values() for _, tensor in tensors_in(state))
        else:
            yield from (tensor for _, tensor in tensors_in(holder))


def _device_of(tensors: list[Tensor]) -> torch.device:
    if tensors:
        return tensors[0].device
    started = torch.accelerator.is_available() and (torch.cuda.is_initialized() or torch.backends.mps.is_available())
    return torch.accelerator.current_accelerator() or torch.device("cpu") if started else torch.device("cpu")


def _given_back(before: Usage, after: Usage) -> int | None:
    """What the process has less of, by the first figure that the device tells."""
    for name in ("reserved", "process"):
        was, now = getattr(before, name), getattr(after, name)
        if was is not None and now is not None:
            return int(was - now)
    return None


def _names(holders: tuple[Any, ...]) -> tuple[str, ...]:
    """The variables that keep what was handed in."""
    found = (holder_of(holder, {id(holders)}) for holder in holders)
    return tuple(dict.fromkeys(str(holder) for holder in found if holder is not None))
