"""`EpochWorkers`: workers that stay from epoch to epoch, and begin each one exactly as workers that are new.

With `persistent_workers=False` a DataLoader starts its workers in every epoch. Each of them gets a seed from the base
seed that the loader draws, and a copy of the dataset as it is then. Workers that stay get the same: the loop draws the
base seed all the same and sends it to each worker, which seeds its generators, calls the `worker_init_fn` again, and
answers whether its copy of the dataset is as it was started with. Where items have changed that, or the dataset was
changed in the process that trains, workers are started anew.

Not seen: what a library keeps in its own modules, and what lies outside of Python.
"""

import multiprocessing
import random
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, MapDataPipe, get_worker_info

from hotloop._torch import ask_workers, dismiss_workers, end_as_garbage, keeps_workers
from hotloop.data.forking import forking
from hotloop.data.loader_rng import LoaderRngState
from hotloop.data.samplers import draw_base_seed, generators_of, has_known_sampler
from hotloop.values.effects import ReachableState, look
from hotloop.values.rng import Rng


def may_keep(loader: DataLoader[Any]) -> bool:
    """Whether the workers of a loader that starts them in every epoch could stay, as far as the loader tells."""
    context = loader.multiprocessing_context or multiprocessing
    method = context.get_start_method(allow_none=True)  # without making the default the person's choice
    return (
        loader.num_workers > 0
        and not loader.persistent_workers
        and has_known_sampler(loader)  # which can be begun again, should the workers have to be started after all
        and not isinstance(loader.dataset, MapDataPipe)
        # Else a worker's dataset is another object from the start.
        and (method or multiprocessing.get_all_start_methods()[0]) == "fork"
    )


class EpochWorkers:
    """The workers of a twin of a loader, epoch by epoch; with `keep`, they stay while they are as new ones would be."""

    def __init__(self, loader: DataLoader[Any], *, keep: bool) -> None:
        self._loader = loader
        self._keep = keep
        self._own = {"persistent_workers": loader.persistent_workers, "worker_init_fn": loader.worker_init_fn}
        self._makers = {name: getattr(loader, name) for name in ("dataset", "collate_fn", "worker_init_fn")}
        self._rngs = [Rng(torch.get_rng_state, torch.set_rng_state), *map(Rng.of, generators_of(loader))]
        self._seen: ReachableState | None = None  # of what makes items, when the present workers were started

    def begin(self, *, again: bool) -> Iterator[Any]:
        """Begin an epoch, with the workers of the one before where that can be: `again` says that it has ended."""
        if self.persist:
            return iter(self._loader)
        seen = None
        if again and keeps_workers(self._loader):
            seen = look(self._makers, fully=True)
            if self.are_as_started(seen) and (batches := self._begin_again()) is not None:
                return batches
        return self.start(seen)

    def start(self, seen: ReachableState | None = None) -> Iterator[Any]:
        """Begin an epoch, or go on in one, with new workers; `seen` is a full look at what makes items now."""
        dismiss_workers(self._loader)
        self._seen = seen or look(self._makers, fully=True)
        self._keep = self._keep and self._seen.complete
        changed = self._own
        if self._keep:
            changed = {"persistent_workers": True, "worker_init_fn": _Birth(self._makers, self._seen)}
        self._loader.__dict__.update(changed)
        with forking():
            batches = iter(self._loader)
        end_as_garbage(batches)  # as the loop is one day, since its parts hold one another
        return batches

    def are_as_started(self, seen: ReachableState | None = None) -> bool:
        """Whether what makes items is what it was when the workers were started."""
        return self._seen is None or _are_same(self._seen, seen or look(self._makers, fully=True))

    @property
    def persist(self) -> bool:
        """Whether workers are there which stay because the person asked for it."""
        return bool(self._own["persistent_workers"]) and keeps_workers(self._loader)

    def end(self, *, persistent: bool = False) -> None:
        """End workers that stay; those that the person asked for only where nobody will use them again."""
        if persistent or not self.persist:
            dismiss_workers(self._loader)

    def _begin_again(self) -> Iterator[Any] | None:
        before = [rng.get_state() for rng in self._rngs]
        try:
            answers = ask_workers(self._loader, _begun, draw_base_seed(self._loader))
            if answers and all(answers):
                return iter(self._loader)
        except RuntimeError:  # a worker has died since
            pass
        self._keep = False
        for rng, state in zip(self._rngs, before, strict=True):
            rng.set_state(state)
        return None


def _are_same(before: ReachableState, now: ReachableState) -> bool:
    """Whether nothing has changed in what makes items; an item that comes from a cache is not made anew."""
    return before.complete and now.complete and before.caches == now.caches and not before.changes(now)


def _begun(base_seed: int) -> bool:
    return _this_worker is not None and _this_worker.begin(base_seed)


class _Birth:
    """A worker_init_fn that calls the person's; in its worker, it remembers what that was started with."""

    def __init__(self, makers: dict[str, Any], seen: ReachableState) -> None:
        self._makers = makers  # and not the loader, whose workers would then end only when garbage is collected
        self._seen = seen
        self._init: Callable[[int], None] | None = makers["worker_init_fn"]

    def __call__(self, number: int) -> None:
        global _this_worker  # noqa: PLW0603 - one per process
        info = get_worker_info()
        assert info is not None
        self._number, self._base_seed, self._seeded = number, info.seed - number, LoaderRngState.now()
        _this_worker = self
        if self._init is not None:
            self._init(number)
            self._seen = look(self._makers, fully=True)

    def begin(self, base_seed: int) -> bool:
        """Be as a new worker; whether that is so."""
        try:
            return self._is_seeded_as_here and self._begin(base_seed)
        except Exception:  # noqa: BLE001 - whatever it is, a new worker raises it at the right place
            return False

    def _begin(self, base_seed: int) -> bool:
        if not self._is_as_started():
            return False
        object.__setattr__(get_worker_info(), "seed", base_seed + self._number)  # the person's code may read it
        _seed(base_seed, self._number)
        if self._init is None:
            return True
        self._init(self._number)
        return self._is_as_started()

    def _is_as_started(self) -> bool:
        return _are_same(self._seen, look(self._makers, fully=True))

    @cached_property
    def _is_seeded_as_here(self) -> bool:
        """Whether PyTorch has seeded this worker as `_seed` does; a later version may do it in another way."""
        _seed(self._base_seed, self._number)
        return not any(self._seeded.differs(LoaderRngState.now()))


_this_worker: _Birth | None = None


def _seed(base_seed: int, number: int) -> None:
    """Seed the global generators of a worker as PyTorch does."""
    random.seed(base_seed + number)
    torch.manual_seed(base_seed + number)
    words = [number, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
    np.random.seed(np.random.SeedSequence(words).generate_state(4))
