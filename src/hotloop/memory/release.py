"""`release` gives memory that nothing needs back to the device."""

import gc
from dataclasses import dataclass

import torch

from hotloop.device.backend import backend_of
from hotloop.memory.oom import clear
from hotloop.memory.usage import Usage, usage
from hotloop.printing.text import size
from hotloop.records import Record


@dataclass(frozen=True)
class Released(Record):
    """What a `release` gave back to the device."""

    before: Usage
    after: Usage
    given_back: int | None  # bytes of this process; None where the device does not tell

    def __str__(self) -> str:
        return f"{self.before.device}: {size(self.given_back)} given back\n{self.after}"


def release(device: str | torch.device | None = None) -> Released:
    """Give memory that nothing needs back to the device: collect garbage, then empty the allocator's cache.

    Only what no name refers to can be given back, so `del` the names (model, optimizer, loss, output) before the call;
    `hotloop.watch_growth` says who holds what stays. Without `device`, it is the accelerator, else the CPU. Not for the
    inside of a loop: the allocator uses its cache again at once, and asking the device for memory anew makes it wait.

    >>> release("cpu").after.device
    'cpu'
    """
    target = _in_use() if device is None else torch.device(device)
    before = usage(target)
    gc.collect()
    if (backend := backend_of(target)).non_blocking:
        backend.synchronize()  # blocks that other streams still use come back only when those are done
    clear(target)
    after = usage(target)
    return Released(before, after, _given_back(before, after))


def _in_use() -> torch.device:
    there = torch.accelerator.current_accelerator(check_available=True)
    return there if there is not None and backend_of(there).is_initialized() else torch.device("cpu")


def _given_back(before: Usage, after: Usage) -> int | None:
    """What the process has less of, by the first figure that the device tells."""
    for name in ("reserved", "process"):
        was, now = getattr(before, name), getattr(after, name)
        if was is not None and now is not None:
            return int(was - now)
    return None
