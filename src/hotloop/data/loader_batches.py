"""`LoaderBatches`: the batches of a loader on the host, with their origins."""

from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader

from hotloop.data.epochs import Epochs, Skip, Tell
from hotloop.data.forking import forking
from hotloop.data.loader_rng import LoaderRng, LoaderRngState, is_stateful
from hotloop.data.on_device import asked_in_advance, is_constant
from hotloop.data.origin import BatchOrigin, Tap
from hotloop.data.position import Position
from hotloop.data.samplers import draw_base_seed, has_known_sampler
from hotloop.data.worker_count import bytes_in, why_workers_stay
from hotloop.data.worker_rng import Workers
from hotloop.values.attributes import parts_of

Batch = tuple[BatchOrigin, Any]


class LoaderBatches(Epochs[Batch]):
    """The batches as the loader gives them, each with its origin."""

    def __init__(self, source: Iterable[Any], tap: Tap | None, *, reads_ahead: bool) -> None:
        """`tap` tells the samples of each batch, where there is one; `reads_ahead`: batches are read early."""
        self._source = source
        self._tap = tap
        self._times = 0  # how often the loader was begun
        self.random_items = _may_be_random(source)
        self.workers = source.num_workers if isinstance(source, DataLoader) else 0
        self.prefetched = asked_in_advance(source)
        here = self.random_items and not self.workers  # whether random items are made in this process
        super().__init__(
            LoaderRng(source, source.dataset if here and isinstance(source, DataLoader) else None),
            state_of_each=here and reads_ahead,
        )
        self._reopened: Iterator[Batch] | None = None  # the epoch in progress, with other workers
        self._staff: Workers | None = None
        if isinstance(source, DataLoader) and source.persistent_workers and not self._is_stateful:
            loader = source if tap is None else tap.loader
            self._staff = Workers(loader, tell=tap is not None and self.random_items)

    def __iter__(self) -> Iterator[Batch]:
        asked = perf_counter()
        batches = self.begin()
        first = True
        while True:
            if self._reopened is not None:
                batches, self._reopened = self._reopened, None
            batch = next(batches, None)
            self.waited += perf_counter() - asked
            if batch is None:
                return
            self.batches += 1
            if first:
                self.batch_bytes = max(self.batch_bytes, bytes_in(batch[1]))
                first = False
            yield batch
            asked = perf_counter()

    @property
    def _is_stateful(self) -> bool:
        return type(self._source) is not DataLoader and is_stateful(self._source)

    def _open(self) -> Iterator[Batch]:
        return self._opened(0)

    def _other_seed(self, position: Position) -> int | None:
        """A seed for another number of workers, whose items are other ones anyhow; None for the same number."""
        if self.workers == position.workers or not (self.random_items and has_known_sampler(self._source)):
            return None
        assert isinstance(self._source, DataLoader)
        if not position.begun:  # else the workers were there, and nothing was drawn for them
            draw_base_seed(self._source)
        own = torch.Generator().set_state(position.began.torch)
        return int(torch.randint(2**62, (), generator=own)) + (position.consumed or 0)

    def _opened(self, first: int, seed: int | None = None) -> Iterator[Batch]:
        self._times += 1
        if self._tap is None:
            with forking():
                batches = iter(self._source)
            return ((BatchOrigin(number), batch) for number, batch in enumerate(batches, first))
        batches = self._tap.begin(first, seed)
        return batches if self._staff is None else self._staff.listen(batches)

    def _open_at(self, position: Position, skip: Skip, tell: Tell | None) -> tuple[Iterator[Batch], int]:
        first = skip.count
        if position.loader is not None and self._is_stateful:
            self._source.load_state_dict(position.loader)  # type: ignore[attr-defined]
            return self._opened(first), 0
        if self._tap is not None and not self.workers:
            batches = self._opened(first)
            skip(self._tap.sampler.latest.draws)
            return batches, 0
        seed = self._other_seed(position)
        if self._tap is not None and (seed is not None or not self.random_items):
            self._tap.sampler.skip = skip
            return self._opened(first, seed), 0
        batches = self._opened(0)
        skip((origin.drawn for origin, _ in batches), tell)
        return batches, skip.count - skip.missing

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
        return "hotloop does not follow its sampler" if self._tap is None else self._tap.why_workers_stay()

    def change_workers(self, number: int, prefetch_factor: int) -> None:
        """Reopen the loader with so many workers where the epoch is; those of before stay where none can be started."""
        tap, epoch, first = self._tap, self._epoch, self.first
        assert tap is not None
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
            tap.sampler.skip, self._epoch = None, epoch
            self._rng.set_state(position.now)
        self.first = first

    def _load_with(self, workers: int, prefetch_factor: int) -> None:
        assert self._tap is not None
        self._tap.loader.__dict__.update(num_workers=workers, prefetch_factor=prefetch_factor)
        self.workers, self.prefetched = workers, asked_in_advance(self._tap.loader)

    def end_workers(self, *, persistent: bool = False) -> None:
        """End workers that wait for the next epoch."""
        if self._tap is not None:
            self._tap.end_workers(persistent=persistent)

    def _has_begun(self) -> bool:
        return self._staff is not None and self._staff.are_there

    def _carried(self) -> tuple[LoaderRngState, ...]:
        return () if self._staff is None else self._staff.carried()

    @property
    def changed_in_workers(self) -> list[str]:
        return [] if self._staff is None else self._staff.changed

    def _restart(self, position: Position) -> None:
        if self._staff is None:
            return
        self._staff.dismiss()
        if not position.begun or position.workers != self.workers:
            return
        if self._tap is not None:
            self._tap.sampler.silent = True
        self._staff.start(position.carried)
        if self._tap is not None:
            self._tap.sampler.silent = False

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
        return None if parts_of(account) is None else account


def _may_be_random(source: object) -> bool:
    if isinstance(source, DataLoader):
        return not is_constant(source.dataset)
    return not isinstance(source, list | tuple)
