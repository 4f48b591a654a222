"""`Stream`: batches that are already on the device, direct, prefetched or resident."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any, Generic, TypeVar, get_args

import torch
from torch.utils.data import DataLoader

from hotloop.data.epochs import Position, Resumption, Tell
from hotloop.data.held import HeldBatches
from hotloop.data.loader_batches import LoaderBatches
from hotloop.data.on_device import Resident, why_not_resident
from hotloop.data.origin import BatchOrigin, check_loader, is_in_order, nothing_came, twin
from hotloop.data.samplers import may_be_empty
from hotloop.device import as_device
from hotloop.device.backend import backend_of
from hotloop.errors import BadArgument
from hotloop.placement import move, pin
from hotloop.placement.placing import resolve
from hotloop.plan import Stream as Kind
from hotloop.values.tree import tensors_in

T = TypeVar("T")
DEPTH = 2  # batches that are copied ahead


class Stream(Generic[T]):
    """The batches of a loader on a device; iterate it once per epoch.

    `kind` is how they get there: `direct` (each when its turn comes), `prefetched` (copied ahead on a side stream of
    a CUDA device) or `resident` (the data lives on the device). All give the same batches in the same order.
    """

    def __init__(
        self,
        loader: Iterable[T],
        device: str | torch.device,
        kind: Kind = "auto",
        device_transform: Callable[[T], T] | None = None,
        *,
        pinned: bool = False,
        workers: int | None = None,
        origins: bool = True,  # whether to find out which samples a batch holds; costs a twin of the loader
    ) -> None:
        check_loader(loader)
        self.loader = loader
        self.source: Iterable[Any] = loader  # what is read: the loader, or a twin with other workers or pinned memory
        self.device = as_device(device)
        self.asked: tuple[Kind, bool, int | None] = (kind, pinned, workers)
        self.kind, self.reason = _choose(loader, self.device, kind)
        self.origin: BatchOrigin | None = None  # of the batch that was given out last
        self._transform = device_transform
        self._settings = _settings(loader)
        self.resident: Resident | None = None
        self._held: HeldBatches | None = None
        if isinstance(loader, list | tuple) and backend_of(self.device).tells_memory and self.kind == "direct":
            self._held = HeldBatches(self.device, len(loader))
        self._epochs: Resident | LoaderBatches
        if self.kind == "resident":
            assert isinstance(loader, DataLoader)
            self._epochs = self.resident = Resident(loader, self.device)
        else:
            self.source = _source(loader, pinned, workers)
            records = origins and is_in_order(self.source)
            self._epochs = LoaderBatches(self.source, records=records, reads_ahead=self.kind == "prefetched")

    def __iter__(self) -> Iterator[T]:
        batches: Iterator[tuple[BatchOrigin, Any]] = iter(self._epochs)
        if self.kind == "prefetched":
            batches = _copied_ahead(batches, self.device)
        empty = True
        for self.origin, batch in batches:
            empty = False
            moved = move(batch, self.device) if self._held is None else self._held.moved(batch)
            yield moved if self._transform is None else self._transform(moved)
        if empty and not self._epochs.first and not may_be_empty(self.loader):
            raise nothing_came(self.loader)

    @property
    def is_current(self) -> bool:
        """Whether the loader still has the attributes (`collate_fn`, `generator`, …) that this stream was made with.

        Workers that persist do not see a change of them, so nor does their stream.
        """
        keeps = isinstance(self.loader, DataLoader) and self.loader.persistent_workers
        return keeps or all(map(is_, self._settings, _settings(self.loader)))

    @property
    def first(self) -> int:
        """The number of the first batch of the epoch in progress: above 0 only in an epoch that was resumed."""
        return self._epochs.first

    @property
    def waited(self) -> float:
        """Seconds for which the loop has waited for the loader so far, starts of workers included."""
        return self._epochs.waited

    @property
    def batches(self) -> int:
        """Batches that were read from the loader so far, in all epochs; none where the data lives on the device."""
        return self._epochs.batches

    @property
    def workers(self) -> int:
        """Workers that load now, or will in the next epoch."""
        return 0 if isinstance(self._epochs, Resident) else self._epochs.workers

    @property
    def batch_bytes(self) -> int:
        """The size of a batch on the host: the largest of those that were the first of their epochs."""
        return self._epochs.batch_bytes

    @property
    def why_workers_stay(self) -> str | None:
        """Why `change_workers` cannot be used; None where it can."""
        if isinstance(self._epochs, Resident):
            return "the data lives on the device, and nobody reads the loader"
        return self._epochs.why_workers_stay()

    def change_workers(self, number: int, prefetch_factor: int | None = None) -> int:
        """Reopen the loader with another number of workers where the epoch is; the number there is now.

        The order of the batches stays, and so does what is drawn from the loader's generators. What is random in items
        comes from the rng states of workers, so it depends on their number. What was under way is loaded again. The
        present workers stay where no process can be started.
        """
        if (why := self.why_workers_stay) is not None:
            raise BadArgument(f"the number of workers cannot change: {why}", fix="leave it to the loader")
        if number < 1:
            raise BadArgument(f"number={number} of workers", fix="give 1 or more")
        assert isinstance(self._epochs, LoaderBatches)
        factor = prefetch_factor or self._epochs.prefetch_factor
        if (number, factor) != (self.workers, self._epochs.prefetch_factor):
            self._epochs.change_workers(number, factor)
            self.asked = (*self.asked[:2], self.workers)
        return self.workers

    def close(self, *, persistent: bool = False) -> None:
        """End workers that wait for the next epoch, if there are any; it then starts new ones, as a loader does.

        `persistent`: those that the person asked for too, as where this stream is not used any more.
        """
        if isinstance(self._epochs, LoaderBatches):
            self._epochs.end_workers(persistent=persistent)

    def position(self, consumed: int | None = None) -> Position:
        """Where the loader is when the training has had so many batches of this epoch; None: between two epochs.

        >>> batches = stream([torch.ones(2), torch.zeros(3)], "cpu")
        >>> first = next(iter(batches))
        >>> again = stream([torch.ones(2), torch.zeros(3)], "cpu")
        >>> again.resume(batches.position(1))
        Resumption(skipped=1, loaded=1, reason=None)
        >>> [batch.tolist() for batch in again]
        [[0.0, 0.0, 0.0]]
        """
        last = self.origin
        if self.resident is not None and consumed:  # what it draws may be used without this stream
            last = self.resident.origin(consumed - 1, self.resident.latest(consumed))
        known = last is not None and last.number + 1 == consumed
        return self._epochs.position(consumed, last.indices if last is not None and known else None)

    def resume(self, position: Position, tell: Tell | None = None) -> Resumption:
        """Make the next epoch go on from a position, that of a stream over the same loader in another process.

        The global rng states are left anyhow: restore those of the moment of the position before you go on.
        `tell(done, all)` is called for each batch that has to be loaded again.
        """
        return self._epochs.resume(position, tell)


def stream(
    loader: Iterable[T],
    device: str | torch.device,
    kind: Kind = "auto",
    *,
    device_transform: Callable[[T], T] | None = None,
) -> Stream[T]:
    """The batches of `loader`, each one on `device` when you get it.

    Whatever the `kind`, they are exactly the batches that the loader gives. `auto` keeps the data on the device where
    every item is always the same tensor (a `TensorDataset`, or a dataset with `resident = True`) and fits, and else
    moves each batch when its turn comes. `device_transform` runs on each batch there, to normalise or augment it.

    >>> [batch.sum().item() for batch in stream([torch.ones(2), torch.ones(3)], "cpu")]
    [2.0, 3.0]
    """
    return Stream(loader, resolve(device), kind, device_transform)


def _settings(loader: object) -> list[Any]:
    """The attributes of a DataLoader, those aside that an epoch changes."""
    if type(loader) is not DataLoader:
        return []
    return [value for name, value in vars(loader).items() if not name.startswith("_")]


def _source(loader: Iterable[T], pinned: bool, workers: int | None) -> Iterable[T]:
    """The loader, or a twin of it that pins its batches or loads them in other processes."""
    if type(loader) is not DataLoader or not (pinned or workers is not None):
        return loader
    changes: dict[str, Any] = {"pin_memory": True} if pinned else {}
    if workers is not None and workers != loader.num_workers:
        changes |= {"num_workers": workers, "prefetch_factor": 2 if workers else None}
        changes |= {"persistent_workers": loader.persistent_workers and workers > 0}
    return twin(loader, **changes)


def _choose(loader: object, device: torch.device, kind: Kind) -> tuple[Kind, str]:
    """The kind to use, and why it is not another one."""
    if kind not in get_args(Kind):
        raise BadArgument(f"unknown kind of stream {kind!r}", fix=f"choose one of: {', '.join(get_args(Kind))}")
    if kind == "direct":
        return "direct", "asked for"
    if kind == "prefetched":
        able = backend_of(device).non_blocking
        return ("prefetched", "asked for") if able else ("direct", f"a {device.type} device cannot prefetch")
    obstacle = why_not_resident(loader, device)
    if obstacle is None:
        return "resident", "every item is always the same tensor, and all of them fit"
    if kind == "resident":
        raise BadArgument(
            f"the data cannot live on {device}: {obstacle}", fix='use kind="auto", or dataset.resident = True'
        )
    # Not copied ahead unasked: where the loader is what a step waits for, pinning costs more than it hides.
    return "direct", obstacle


def _copied_ahead(
    batches: Iterator[tuple[BatchOrigin, Any]], device: torch.device
) -> Iterator[tuple[BatchOrigin, Any]]:
    """The same batches, copied to the device on a side stream while the ones before them compute."""
    backend = backend_of(device)
    side = backend.new_stream()
    ready: deque[tuple[BatchOrigin, Any, torch.Event]] = deque()
    failures: list[Exception] = []  # of the loader, which come after the batches before them

    def begin_copies() -> None:
        while len(ready) <= DEPTH and not failures:
            try:
                following = next(batches, None)
            except Exception as error:  # noqa: BLE001  # whichever it is, it is raised in its turn
                failures.append(error)
                return
            if following is None:
                return
            origin, batch = following
            with backend.on_stream(side):
                moved = move(pin(batch), device)
                copied = backend.new_event()
                copied.record(side)
            ready.append((origin, moved, copied))

    begin_copies()
    while ready:
        origin, moved, copied = ready.popleft()
        current = backend.current_stream()
        current.wait_event(copied)  # the device waits, the host does not
        for _, tensor in tensors_in(moved):
            tensor.record_stream(current)  # its memory may be used again only after the work that reads it
        yield origin, moved
        begin_copies()
    if failures:
        raise failures[0]
