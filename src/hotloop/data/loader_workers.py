"""The workers of a loader between its epochs: kept where they are as new ones, and asked for their rng states.

With `persistent_workers=False` a DataLoader starts its workers in every epoch. Each of them gets a seed from the base
seed that the loader draws, and a copy of the dataset as it is then. `EpochWorkers` stay and get the same: the loop
draws the base seed all the same and sends it to each worker, which seeds its generators, calls the `worker_init_fn`
again, and answers whether its copy of the dataset is as it was started with. Where items have changed that, or the
dataset was changed in the process that trains, workers are started anew. Not seen: what a library keeps in its own
modules, and what lies outside of Python.

With `persistent_workers=True` they continue with rng states that only they know: global ones, and those of generators
that their copy of the dataset holds. Where their items may be random, `PersistentWorkers` are asked for them between
two epochs, and a resumed run starts its workers with them. What else the items change in the dataset of a worker
cannot be given to other ones.
"""

import gc
import multiprocessing
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, MapDataPipe, get_worker_info

from hotloop._torch import ask_workers, dismiss_workers, end_as_garbage, keeps_workers
from hotloop.data.loader_rng import LoaderRngState
from hotloop.data.samplers import draw_base_seed, generators_of, has_known_sampler
from hotloop.values.reach import ReachableState, look
from hotloop.values.rng import Rng, generators_in


@contextmanager
def forking() -> Iterator[None]:
    """Around the start of a loader's workers: garbage that they are born with is left to their parent.

    A forked process cannot speak to CUDA. Where its garbage collector comes upon a cycle of the parent's, and a tensor
    on the GPU is in it, the attempt to free that tensor aborts the worker.
    """
    if not torch.cuda.is_initialized() or gc.get_freeze_count():  # a person who freezes has their own idea of it
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
            changed = {"persistent_workers": True, "worker_init_fn": _KeptInit(self._makers, self._seen)}
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
    return _kept_worker is not None and _kept_worker.begin(base_seed)


class _KeptInit:
    """A worker_init_fn that calls the person's; in its worker, it remembers what that was started with."""

    def __init__(self, makers: dict[str, Any], seen: ReachableState) -> None:
        self._makers = makers  # and not the loader, whose workers would then end only when garbage is collected
        self._seen = seen
        self._init: Callable[[int], None] | None = makers["worker_init_fn"]

    def __call__(self, number: int) -> None:
        global _kept_worker  # noqa: PLW0603 - one per process
        info = get_worker_info()
        assert info is not None
        self._number, self._base_seed, self._seeded = number, info.seed - number, LoaderRngState.now()
        _kept_worker = self
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


_kept_worker: _KeptInit | None = None


def _seed(base_seed: int, number: int) -> None:
    """Seed the global generators of a worker as PyTorch does."""
    random.seed(base_seed + number)
    torch.manual_seed(base_seed + number)
    words = [number, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
    np.random.seed(np.random.SeedSequence(words).generate_state(4))


@dataclass(frozen=True)
class _TellingInit:
    """A worker_init_fn that calls the person's; in its worker, it tells the rng states, or begins with given ones."""

    init: Callable[[int], None] | None
    collate: object  # that this worker has too
    states: tuple[LoaderRngState, ...] = ()

    def __call__(self, number: int) -> None:
        global _asked_worker  # noqa: PLW0603 - one per process
        _asked_worker = self
        if self.init is not None:
            self.init(number)
        if number < len(self.states):
            self.states[number].restore()
            for rng, state in zip(self._own(), self.states[number].own, strict=False):
                rng.set_state(state)

    def _own(self) -> list[Rng]:
        """The generators that the dataset of this worker and what collates its items hold."""
        found = generators_in([_info().dataset, self.collate])
        return [Rng.of(each) for each in {id(each): each for each in found}.values()]

    def told(self) -> bytes:
        """The number of this worker and its rng states; in bytes, for tensors would travel through shared memory."""
        states = replace(LoaderRngState.now(), own=tuple(rng.get_state() for rng in self._own()))
        return pickle.dumps((_info().id, states))


_asked_worker: _TellingInit | None = None


def _info() -> Any:
    info = get_worker_info()
    assert info is not None
    return info


def _told() -> bytes | None:
    return None if _asked_worker is None else _asked_worker.told()


class PersistentWorkers:
    """Workers of a loader that persist, and what they tell of their rng states between two epochs."""

    def __init__(self, loader: DataLoader[Any], *, tell: bool) -> None:
        self._loader = loader
        self._init = _TellingInit(loader.worker_init_fn, loader.collate_fn) if tell else None
        self._carried: tuple[LoaderRngState, ...] | None = ()  # None: they were not asked yet
        if tell:
            loader.__dict__["worker_init_fn"] = self._init

    def carried(self) -> tuple[LoaderRngState, ...]:
        """The states of all workers between two epochs; empty where they are not known."""
        if self._carried is None:
            answers = filter(None, ask_workers(self._loader, _told))
            told = dict(map(pickle.loads, answers))  # of workers of this process
            self._carried = tuple(state for _, state in sorted(told.items()))
        return self._carried

    def begin_epoch(self) -> None:
        """In an epoch that is left early, what they do last is not known."""
        self._carried = ()

    def end_epoch(self) -> None:
        """After its last batch the workers can be asked."""
        self._carried = () if self._init is None else None

    def dismiss(self) -> None:
        """Let the next epoch begin with new workers."""
        dismiss_workers(self._loader)
        self._carried = ()

    def start(self, carried: tuple[LoaderRngState, ...]) -> None:
        """Start them with rng states that workers before them had; the loader must have nothing to load."""
        init = self._loader.worker_init_fn
        if self._init is not None:
            self._loader.__dict__["worker_init_fn"] = replace(self._init, states=carried)
        try:
            with forking():
                end_as_garbage(iter(self._loader))
        finally:
            self._loader.__dict__["worker_init_fn"] = init
        self._carried = carried
