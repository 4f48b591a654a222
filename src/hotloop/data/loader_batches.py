"""`LoaderBatches`: the batches of a loader on the host, with their origins."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader

from hotloop._torch import keeps_workers
from hotloop.data.epochs import Epochs, Position, Skip, Tell
from hotloop.data.loader_rng import LoaderRng, LoaderRngState, is_stateful
from hotloop.data.loader_workers import EpochWorkers, PersistentWorkers, forking, may_keep
from hotloop.data.on_device import asked_in_advance, is_constant
from hotloop.data.origin import BatchOrigin, twin
from hotloop.data.samplers import draw_base_seed, has_known_sampler
from hotloop.data.worker_count import bytes_in, why_workers_stay
from hotloop.values.attributes import plain

_END = object()


class RecordingSampler:
    """A sampler that keeps what it drew until the batch arrives."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.latest = Draws(iter(()))  # of the epoch that was begun last
        self._skip: Skip | None = None  # drops the first draws of the next epoch
        self._is_silent = False

    def __iter__(self) -> Iterator[Any]:
        # At once: some samplers draw now, others when they are asked. A DataLoader with workers begins twice.
        self.latest = Draws(iter(()) if self._is_silent else iter(self.sampler), self._skip)
        return self.latest

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    @contextmanager
    def skipping(self, skip: Skip) -> Iterator[None]:
        """Let an epoch that is begun inside drop its first draws."""
        self._skip = skip
        try:
            yield
        finally:
            self._skip = None

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Let an epoch that is begun inside have no draws."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False


class Draws:
    """What a sampler draws in one epoch; `drawn` are those whose batches have not arrived."""

    def __init__(self, draws: Iterator[Any], skip: Skip | None = None) -> None:
        self.draws = draws
        self.drawn: deque[Any] = deque()
        self._skip = skip

    def __iter__(self) -> "Draws":
        return self

    def __next__(self) -> Any:
        if self._skip is not None:  # by the time of the first draw
            skip, self._skip = self._skip, None
            skip(self.draws)
        drawn = next(self.draws)
        self.drawn.append(drawn)
        return drawn


class LoaderBatches(Epochs[Any]):
    """The batches as the loader gives them, each with its origin.

    With `records`, they come from a twin of the DataLoader whose sampler records what it draws. The twin shares
    everything else with the loader, sampler and generator included, so it gives exactly the loader's batches.
    """

    def __init__(self, source: Iterable[Any], *, records: bool, reads_ahead: bool) -> None:
        """`reads_ahead`: batches are read before they are trained on."""
        self._source = source
        self._loader: Any = source  # what is iterated
        self._sampler: RecordingSampler | None = None
        self._epoch_workers: EpochWorkers | None = None
        self._persistent: PersistentWorkers | None = None
        self._draws: Draws | None = None  # of the epoch that was begun last
        self._times = 0  # how often the loader was begun
        self._reopened: Iterator[Any] | None = None  # the epoch in progress, with other workers
        self.random_items = _may_be_random(source)
        self.workers = source.num_workers if isinstance(source, DataLoader) else 0
        self.prefetched = asked_in_advance(source)
        here = self.random_items and not self.workers  # whether random items are made in this process
        super().__init__(
            LoaderRng(source, source.dataset if here and isinstance(source, DataLoader) else None),
            state_of_each=here and reads_ahead,
        )
        if not isinstance(source, DataLoader):
            return
        if records:
            name = "sampler" if source.batch_sampler is None else "batch_sampler"
            self._sampler = RecordingSampler(getattr(source, name))
            self._loader = twin(source, **{name: self._sampler})
        if source.persistent_workers and not self._is_stateful:
            self._persistent = PersistentWorkers(self._loader, tell=records and self.random_items)
        if records and self.workers:
            self._epoch_workers = EpochWorkers(self._loader, keep=may_keep(source))

    def __iter__(self) -> Iterator[tuple[BatchOrigin, Any]]:
        asked = perf_counter()
        batches = self.begin()
        epoch, draws, first = self._epoch, self._draws, self.first
        number, dataset = first, getattr(self._loader, "dataset", None)
        try:
            while True:
                if self._reopened is not None:
                    batches, self._reopened = self._reopened, None
                    epoch, draws = self._epoch, self._draws
                batch = next(batches, _END)
                self.waited += perf_counter() - asked
                if batch is _END:
                    break
                self.batches += 1
                if number == first:
                    self.batch_bytes = max(self.batch_bytes, bytes_in(batch))
                yield BatchOrigin(number, None if draws is None else draws.drawn.popleft(), dataset), batch
                number += 1
                asked = perf_counter()
            if self._persistent is not None:
                self._persistent.end_epoch()
        finally:
            if self._epoch_workers is not None and epoch is not None and epoch is self._epoch and not epoch.ended:
                self._epoch_workers.end()

    @property
    def _is_stateful(self) -> bool:
        return type(self._source) is not DataLoader and is_stateful(self._source)

    def _open(self, seed: int | None = None) -> Iterator[Any]:
        """With `seed`, workers get theirs from it, and the loader's generator is not drawn from for them."""
        self._times += 1
        if self._epoch_workers is None:
            with forking():
                batches: Iterator[Any] = iter(self._loader)
        else:
            # An epoch that was left early has batches under way.
            again = self._epoch is not None and self._epoch.ended
            own = self._loader.generator
            if seed is not None:
                self._loader.__dict__["generator"] = torch.Generator().manual_seed(seed)
            try:
                batches = self._epoch_workers.begin(again=again)
            finally:
                self._loader.__dict__["generator"] = own
        if self._sampler is not None:
            self._draws = self._sampler.latest  # another epoch may begin before this one ends
        if self._persistent is not None:
            self._persistent.begin_epoch()
        return batches

    def _open_at(self, position: Position, skip: Skip, tell: Tell | None) -> tuple[Iterator[Any], int]:
        if position.loader is not None and self._is_stateful:
            self._source.load_state_dict(position.loader)  # type: ignore[attr-defined]
            return self._open(), 0
        if self._sampler is not None and not self.workers:
            batches = self._open()
            skip(self._sampler.latest.draws)
            return batches, 0
        seed = self._other_seed(position)
        if self._sampler is not None and (seed is not None or not self.random_items):
            with self._sampler.skipping(skip):
                return self._open(seed), 0
        batches, draws = self._open(), self._draws
        skip((None if draws is None else draws.drawn.popleft() for _ in batches), tell)
        return batches, skip.count - skip.missing

    def _other_seed(self, position: Position) -> int | None:
        """A seed for another number of workers, whose items are other ones anyhow; None for the same number."""
        if self.workers == position.workers or not (self.random_items and has_known_sampler(self._source)):
            return None
        assert isinstance(self._source, DataLoader)
        if not position.begun:  # else the workers were there, and nothing was drawn for them
            draw_base_seed(self._source)
        own = torch.Generator().set_state(position.began.torch)
        return int(torch.randint(2**62, (), generator=own)) + (position.consumed or 0)

    @property
    def prefetch_factor(self) -> int:
        """Batches that each worker is asked for in advance."""
        return self.prefetched // self.workers if self.workers else 0

    def why_workers_stay(self) -> str | None:
        """Why the number of workers cannot change; None where it can."""
        if why := why_workers_stay(self._source):
            return why
        if self._epoch is None or self._epoch.ended:
            return "no epoch is in progress: give Stream(…, workers=…)"
        if self._epoch_workers is None:
            return "hotloop does not follow its sampler"
        if not self._epoch_workers.are_as_started():
            return "the dataset was changed after its workers were started, which do not see that"
        return None

    def change_workers(self, number: int, prefetch_factor: int) -> None:
        """Reopen the loader with so many workers where the epoch is; those of before stay where none can be started."""
        epoch, first = self._epoch, self.first
        assert epoch is not None
        position = self.position(epoch.read, None)
        before = (self.workers, self.prefetch_factor)
        self._load_with(number, prefetch_factor)
        try:
            self.resume(position)
            self._reopened, self._ready = self._ready, None
            position.now.restore()
        except OSError:  # no process or memory is left for them
            self._load_with(*before)
            self._epoch = epoch
            self._rng.set_state(position.now)
        self.first = first

    def _load_with(self, workers: int, prefetch_factor: int) -> None:
        self._loader.__dict__.update(num_workers=workers, prefetch_factor=prefetch_factor)
        self.workers, self.prefetched = workers, asked_in_advance(self._loader)

    def end_workers(self, *, persistent: bool = False) -> None:
        """End workers that wait for the next epoch; those that the person asked for only if `persistent`."""
        if self._epoch_workers is not None and (self._epoch is None or self._epoch.ended):
            self._epoch_workers.end(persistent=persistent)

    def _has_begun(self) -> bool:
        return self._persistent is not None and keeps_workers(self._loader)

    def _carried(self) -> tuple[LoaderRngState, ...]:
        return () if self._persistent is None else self._persistent.carried()

    def _restart(self, position: Position) -> None:
        if self._persistent is None:
            return
        self._persistent.dismiss()
        if not position.begun or position.workers != self.workers:
            return
        with nullcontext() if self._sampler is None else self._sampler.silent():
            self._persistent.start(position.carried)

    def _why_never(self) -> str | None:
        if isinstance(self._source, DataLoader) and self.workers and not getattr(self._source, "in_order", True):
            return "the loader gives batches as its workers finish them (in_order=False), which is never the same twice"
        if isinstance(self._source, Iterator) and self._times > 1:
            return "the loader is an iterator, and what was read of it in earlier epochs is not skipped"
        if self._is_stateful and self.workers and self.random_items:
            return "the loader resumes by its own state_dict, which does not hold the rng states of its workers"
        return None

    def _own_account(self) -> Any:
        if not self._is_stateful:
            return None
        account = self._source.state_dict()  # type: ignore[attr-defined]
        return None if plain(account) is None else account


def _may_be_random(source: object) -> bool:
    if isinstance(source, DataLoader):
        return not is_constant(source.dataset)
    return not isinstance(source, list | tuple)
