"""`usage` tells allocated, reserved, process and device memory apart; `holdings` says what a model itself holds."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._torch import storage_id
from hotloop.device import as_device
from hotloop.device.backend import backend_of
from hotloop.memory.storages import storages_of
from hotloop.monitor.main_memory import machine_memory
from hotloop.placement.placing import resolve
from hotloop.printing.text import size
from hotloop.records import Record
from hotloop.values.tree import tensors_in


@dataclass(frozen=True)
class Usage(Record):
    """The memory of a device at one moment, in bytes; what is unknown is None, never 0."""

    device: str
    allocated: int | None = None  # in live tensors, as the allocator counts them
    reserved: int | None = None  # that the allocator holds from the device, the cached part included
    process: int | None = None  # of this process in all: reserved, the context of the device, loaded code
    free: int | None = None  # that anybody could still take
    total: int | None = None

    @property
    def cached(self) -> int | None:
        """Reserved and in no tensor: what `release` can give back, as far as no block of it is in use."""
        return None if self.reserved is None or self.allocated is None else self.reserved - self.allocated

    @property
    def others(self) -> int | None:
        """What other processes hold; only known where the share of this one is."""
        if self.total is None or self.free is None or self.process is None:
            return None
        return max(self.total - self.free - self.process, 0)

    def __str__(self) -> str:
        own = {"allocated": self.allocated, "reserved": self.reserved, "in this process": self.process}
        said = [f"{size(bytes_)} {name}" for name, bytes_ in own.items() if bytes_ is not None]
        if self.others is not None:
            said.append(f"{size(self.others)} in others")
        if self.free is not None:
            said.append(f"{size(self.free)} free" + (f" of {size(self.total)}" if self.total is not None else ""))
        elif self.total is not None:
            said.append(f"{size(self.total)} in all")
        return f"{self.device}: {', '.join(said) or 'unknown'}"


@dataclass(frozen=True)
class DeviceHoldings(Record):
    """The bytes that a model and its optimizers hold on one device between two steps."""

    device: str
    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.buffers + self.gradients + self.optimizer

    def __str__(self) -> str:
        parts = {"parameters": self.parameters, "gradients": self.gradients, "optimizer state": self.optimizer}
        parts["buffers"] = self.buffers
        return f"{self.device}: {size(self.total)} (" + ", ".join(f"{n} {size(b)}" for n, b in parts.items()) + ")"


@dataclass(frozen=True)
class Holdings(Record):
    """The same, for each device on which there is anything."""

    devices: tuple[DeviceHoldings, ...]

    @property
    def total(self) -> int:
        return sum(held.total for held in self.devices)

    def on(self, device: str | torch.device) -> DeviceHoldings:
        """What is held on one device."""
        return next((held for held in self.devices if held.device == str(device)), DeviceHoldings(str(device)))

    def __str__(self) -> str:
        return "\n".join(map(str, self.devices)) or "nothing"


def usage(device: str | torch.device = "cpu") -> Usage:
    """What is in use on `device` now, and by whom.

    >>> now = usage("cpu")
    >>> now.allocated is None and 0 < now.process < now.total
    True
    """
    target = as_device(device)
    backend = backend_of(target)
    if backend.is_host:
        left, ram = machine_memory()
        return Usage("cpu", process=psutil.Process().memory_info().rss, free=left, total=ram)
    if backend.tells_memory:
        target = resolve(target)
        backend = backend_of(target)
    free, total = backend.mem_get_info()
    reserved = backend.memory_reserved()
    return Usage(
        str(target),
        allocated=backend.memory_allocated(),
        reserved=reserved,
        process=None if (uuid := backend.uuid()) is None else _process(uuid, reserved or 0),
        free=free,
        total=total,
    )


def holdings(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer] = ()) -> Holdings:
    """Bytes of parameters, gradients, optimizer state and buffers, by device; memory that is shared counts once.

    >>> print(holdings(nn.Linear(100, 10)))
    cpu: 3.9 KiB (parameters 3.9 KiB, gradients 0 B, optimizer state 0 B, buffers 0 B)
    """
    several = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    learned = [*model.parameters(), *(p for o in several for group in o.param_groups for p in group["params"])]
    kinds: dict[str, Iterable[Tensor]] = {
        "parameters": learned,
        "buffers": model.buffers(),
        "gradients": [p.grad for p in learned if p.grad is not None],
        "optimizer": [t for o in several for state in o.state.values() for _, t in tensors_in(state)],
    }
    seen: set[int] = set()
    found: dict[str, dict[str, int]] = {}
    for kind, tensors in kinds.items():
        for storage in (s for tensor in tensors for s in storages_of(tensor)):
            if (key := storage_id(storage)) not in seen:
                seen.add(key)
                on = found.setdefault(str(storage.device), {})
                on[kind] = on.get(kind, 0) + storage.nbytes()
    return Holdings(tuple(DeviceHoldings(device, **parts) for device, parts in found.items()))


def main_memory_left() -> int:
    """Bytes of main memory that this process can still take: the free ones, within `ulimit -v` and `-d`."""
    left, _ = machine_memory()
    process = psutil.Process()
    if hasattr(process, "rlimit"):  # Linux alone tells
        now = process.memory_info()
        for kind, used in ((psutil.RLIMIT_AS, now.vms), (psutil.RLIMIT_DATA, now.data)):
            limit, _ = process.rlimit(kind)
            if limit != psutil.RLIM_INFINITY:
                left = min(left, max(limit - used, 0))
    return left


def _process(uuid: str, reserved: int) -> int | None:
    """What NVML says that this process holds on a GPU; None where it cannot be told for certain."""
    from hotloop.monitor.nvml_gpus import Failed, Library  # noqa: PLC0415  # of a GPU alone
    from hotloop.monitor.processes import sees_whole_machine  # noqa: PLC0415

    try:
        library = Library()
    except Failed:
        return None
    handle = library.or_none("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
    processes = [] if handle is None else library.or_none("nvmlDeviceGetComputeRunningProcesses", handle) or []
    library.or_none("nvmlShutdown")
    own = {p.pid: p.usedGpuMemory for p in processes}.get(os.getpid())
    # In a container the numbers of processes are its own, and may be those of strangers outside.
    certain = sees_whole_machine() or len(processes) == 1
    return own if own is not None and own >= reserved and certain else None
