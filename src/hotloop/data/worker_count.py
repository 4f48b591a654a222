"""How many workers a loader should have: `workers_for` says a number and why, within the cores and the memory."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset

from hotloop.data.samplers import has_known_sampler
from hotloop.device.machine import usable_cores
from hotloop.memory.storages import storages_of
from hotloop.monitor.main_memory import machine_memory
from hotloop.printing.text import an, duration, plural, size
from hotloop.values.tree import tensors_in

HEADROOM = 1.25  # batches that workers could make for each one that is needed: their times vary
TOLERATED_WAIT = 0.05  # share of the time that the loop may wait for data
MOST_BATCH_BYTES = 2 << 30  # bytes of batches under way, at most
BATCH_MEMORY_SHARE = 0.1  # of main memory, likewise


@dataclass(frozen=True)
class WorkersAdvice:
    """How many workers a loader should have, and why; `number` is that of now where it should stay."""

    number: int
    prefetch_factor: int | None
    why: str


@dataclass(frozen=True)
class LoadingLimits:
    """What loading may take of this machine."""

    cores: int  # that this process may use
    room: int  # bytes for batches under way

    @classmethod
    def here(cls, root: Path = Path("/")) -> "LoadingLimits":
        """Those of this process, its container and its shared memory included."""
        return cls(usable_cores(root), _room(root))

    def workers_in(self, batch_bytes: int, prefetch_factor: int) -> int:
        """How many workers may have that many batches under way each."""
        return self.room // max(1, batch_bytes * prefetch_factor)


def bytes_in(batch: object) -> int:
    """The bytes of the tensors of a batch."""
    tensors = [tensor for _, tensor in tensors_in(batch)]
    sparse = [storage.nbytes() for t in tensors if t.layout != torch.strided for storage in storages_of(t)]
    return sum(sparse) + sum(tensor.nbytes for tensor in tensors if tensor.layout == torch.strided)


def why_workers_stay(loader: object) -> str | None:
    """Why the number of a loader's workers is not to be changed; None where it may be.

    >>> why_workers_stay([1, 2])
    'a list has no workers'
    """
    if type(loader) is not DataLoader:
        own = isinstance(loader, DataLoader)
        return f"{an(type(loader).__name__)} " + ("is a subclass of DataLoader" if own else "has no workers")
    if isinstance(loader.dataset, IterableDataset):
        return "the dataset is an IterableDataset, which its workers share among themselves"
    if not loader.num_workers:
        return "the loader has no workers, and workers would change the randomness in items"
    if not getattr(loader, "in_order", True):
        return "the loader gives batches as its workers finish them (in_order=False)"
    if loader.multiprocessing_context is not None:
        return "the loader has a multiprocessing_context of its own"
    if not has_known_sampler(loader):
        return "the loader has a sampler of its own, whose order may depend on how far ahead it is asked"
    return None


def workers_for(
    loader: object,
    *,
    batch_seconds: float,
    waited: float,
    step_seconds: float,
    workers: int | None = None,
    batch_bytes: int = 0,
    limits: LoadingLimits | None = None,
) -> WorkersAdvice:
    """The number of workers with which a loader keeps up with the training, a quarter to spare.

    `batch_seconds` pass from one batch to the next, a share `waited` of them in waiting for the loader, and a step
    takes `step_seconds` on the device. `workers` are there now, where that is not what the loader says; `batch_bytes`
    is the size of a batch. A loader that is None has so many workers, and nothing keeps them from changing.

    >>> loader = DataLoader([1, 2, 3, 4], num_workers=1)
    >>> limits = LoadingLimits(cores=16, room=1 << 30)
    >>> workers_for(loader, batch_seconds=0.080, waited=0.7, step_seconds=0.020, limits=limits).number
    5
    """
    own = loader if isinstance(loader, DataLoader) else None
    now = workers if workers is not None else 0 if own is None else own.num_workers
    ahead = own.prefetch_factor if own is not None and own.num_workers else None
    if waited < TOLERATED_WAIT:
        return WorkersAdvice(now, ahead, f"the loader keeps up: the loop waits {waited:.0%} of its time for it")
    waits = f"the loop waits {waited:.0%} of its time for the loader"
    # A loop that waits goes at the pace of the loader. Without workers, it makes the batch in that time itself.
    seconds = batch_seconds * now if now else batch_seconds * waited
    needed = math.ceil(HEADROOM * seconds / max(step_seconds, 1e-6))
    limits = limits or LoadingLimits.here()
    number, factor, bound = _within(limits, needed, now, ahead or 2, batch_bytes)
    pace = max(seconds / number, step_seconds)
    gain = f"a batch would take {duration(pace)} instead of {duration(batch_seconds)}"
    if fixed := loader is not None and why_workers_stay(loader):
        if now or own is None or isinstance(own.dataset, IterableDataset):
            return WorkersAdvice(now, ahead, f"{waits}, but {fixed}")
        return WorkersAdvice(0, None, f"{waits}, but {fixed}; with num_workers={number}, {gain}")
    if needed <= now:
        return WorkersAdvice(
            now, ahead, f"{waits}, but {plural(now, 'worker')} should keep up: some batches take longer"
        )
    if number <= now:
        return WorkersAdvice(now, ahead, f"{waits}; {needed} workers would keep up, {now} stay: {bound}")
    who = f"{plural(now, 'worker')} take{'s' * (now == 1)}" if now else "this process takes"
    takes = f"{who} {duration(batch_seconds)} for a batch, a step {duration(step_seconds)}"
    why = f"{waits}: {takes}; "
    if number == needed:
        return WorkersAdvice(number, factor, f"{why}{plural(number, 'worker')} keep up")
    return WorkersAdvice(number, factor, f"{why}{needed} workers would keep up, {number} is the most: {bound}")


def _within(limits: LoadingLimits, needed: int, now: int, factor: int, batch_bytes: int) -> tuple[int, int, str]:
    """The number and the prefetch factor that the machine has room for, and what bounds them."""
    # All of the cores: where so many do not keep up, the loop waits, and its own core is idle meanwhile.
    number, bound = min(needed, limits.cores), f"this process may use {plural(limits.cores, 'core')}"
    if limits.workers_in(batch_bytes, factor) < number:
        factor = 1
        if (most := limits.workers_in(batch_bytes, factor)) < number:
            number = max(1, most)
            bound = f"a batch takes {size(batch_bytes)}, and {size(limits.room)} are for batches under way"
    return max(number, now, 1), factor, bound


def _room(root: Path) -> int:
    _, total = machine_memory(root)
    room = min(MOST_BATCH_BYTES, int(BATCH_MEMORY_SHARE * total))
    try:
        # Workers give tensors through shared memory, and die without a word where it is full.
        return min(room, shutil.disk_usage(root / "dev/shm").free // 2)
    except OSError:
        return room
