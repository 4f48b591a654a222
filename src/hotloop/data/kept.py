"""`EpochWorkers`: workers that stay from epoch to epoch, and begin each one exactly as workers that are new.

With `persistent_workers=False` a DataLoader starts its workers in every epoch. Each of them gets a seed from the base
seed that the loader draws, and a copy of the dataset as it is then. Workers that stay get the same: the loop draws the
base seed all the same, the first indices of the epoch bring it to each worker, and the worker seeds its generators and
calls the `worker_init_fn` again. It also compares its copy of the dataset with the one that it was started with. Where
items have changed that, or the dataset was changed in the process that trains, workers are started anew.

Not seen: what a library keeps in its own modules, and what lies outside of Python.
"""

import functools
import mmap
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, MapDataPipe, get_worker_info

from hotloop._torch import dismiss_workers, end_as_garbage, keeps_workers
from hotloop.data.dataset_state import DatasetState
from hotloop.data.forking import forking
from hotloop.data.samplers import draw_base_seed, generators_of, has_known_sampler
from hotloop.values.rng import Rng

ANSWER_WITHIN = 2.0  # seconds until a worker that does not answer is taken to be unable to
Note = Callable[[Any], Any]


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
        self._state: DatasetState | None = None  # when the present workers were started
        self._answers: Any = None  # of each worker, in shared memory
        self._epoch = 0

    def begin(self, send: Callable[[Note | None], object], *, again: bool) -> Iterator[Any]:
        """Begin an epoch, with the workers of the one before where that can be: `again` says that it has ended.

        `send` is given what puts a note on the indices that go to the workers.
        """
        if self.persist:
            return iter(self._loader)
        state = None
        if again and keeps_workers(self._loader):
            state = DatasetState(self._makers)
            if self.are_as_started(state) and (batches := self._begin_again(send)) is not None:
                return batches
        return self.start(state)

    def start(self, state: DatasetState | None = None) -> Iterator[Any]:
        """Begin an epoch, or go on in one, with new workers; `state` is that of the dataset now."""
        dismiss_workers(self._loader)
        self._state = state or DatasetState(self._makers)
        self._keep = self._keep and self._state.complete
        changed = self._own
        if self._keep:
            self._answers = _shared(self._loader.num_workers)
            birth = _Birth(self._makers, self._answers, self._state)
            changed = {"persistent_workers": True, "worker_init_fn": birth}
        self._loader.__dict__.update(changed)
        with forking():
            batches = iter(self._loader)
        end_as_garbage(batches)  # as the loop is one day, since its parts hold one another
        return batches

    def are_as_started(self, state: DatasetState | None = None) -> bool:
        """Whether the dataset is what it was when the workers were started."""
        return self._state is None or self._state.same(state or DatasetState(self._makers))

    @property
    def persist(self) -> bool:
        """Whether workers are there which stay because the person asked for it."""
        return bool(self._own["persistent_workers"]) and keeps_workers(self._loader)

    def end(self, *, persistent: bool = False) -> None:
        """End workers that stay; those that the person asked for only where nobody will use them again."""
        if persistent or not self.persist:
            dismiss_workers(self._loader)

    def _begin_again(self, send: Callable[[Note | None], object]) -> Iterator[Any] | None:
        before = [rng.get_state() for rng in self._rngs]
        self._epoch += 1
        seed = draw_base_seed(self._loader)
        sent = 0

        def note(drawn: Any) -> Any:
            nonlocal sent
            sent += 1
            return _Opening(drawn, self._epoch, seed)

        send(note)
        try:
            batches = iter(self._loader)
            if self._are_as_new(min(sent, self._loader.num_workers)):
                return batches
        except RuntimeError:  # a worker has died since
            pass
        finally:
            send(None)
        self._keep = False
        for rng, state in zip(self._rngs, before, strict=True):
            rng.set_state(state)
        return None

    def _are_as_new(self, asked: int) -> bool:
        until = time.monotonic() + ANSWER_WITHIN
        answers = self._answers[:asked]
        while (abs(answers) < self._epoch).any():
            if time.monotonic() > until:
                return False
            time.sleep(2e-4)
        return bool((answers == self._epoch).all())


def _shared(length: int) -> Any:
    """An array that forked workers write to; no tensor, since epochs may begin in inference mode."""
    return np.frombuffer(mmap.mmap(-1, 8 * length), np.int64)


class _Birth:
    """A worker_init_fn that calls the person's, and lets the worker remember what it was started with."""

    def __init__(self, makers: dict[str, Any], answers: Any, state: DatasetState) -> None:
        self.makers = makers  # and not the loader, whose workers would then end only when garbage is collected
        self.answers = answers
        self.state = state

    def __call__(self, number: int) -> None:
        global _this_worker  # noqa: PLW0603 - one per process
        info = get_worker_info()
        assert info is not None
        _this_worker = _Worker(self, number, _Seeds(info.seed - number, number))
        if self.init is not None:
            self.init(number)
            _this_worker.state = DatasetState(self.makers)

    @property
    def init(self) -> Callable[[int], None] | None:
        """The person's own."""
        init: Callable[[int], None] | None = self.makers["worker_init_fn"]
        return init


class _Worker:
    """In a worker: what it was started with."""

    def __init__(self, birth: _Birth, number: int, seeds: "_Seeds") -> None:
        self.state = birth.state
        self._birth = birth
        self._number = number
        self._seeds = seeds
        self._epoch = 0

    def begin(self, epoch: int, base_seed: int) -> None:
        """Be as a new worker, and answer whether that is so; once per epoch."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        try:
            is_new = self._seeds.are_known and self._begin(base_seed)
        except Exception:  # noqa: BLE001 - whatever it is, a new worker raises it at the right place
            is_new = False
        self._birth.answers[self._number] = epoch if is_new else -epoch

    def _begin(self, base_seed: int) -> bool:
        if not self._is_as_started():
            return False
        object.__setattr__(get_worker_info(), "seed", base_seed + self._number)  # the person's code may read it
        _seed(base_seed, self._number)
        if self._birth.init is None:
            return True
        self._birth.init(self._number)
        return self._is_as_started()

    def _is_as_started(self) -> bool:
        return self.state.same(DatasetState(self._birth.makers))


_this_worker: _Worker | None = None


class _Opening:
    """Indices that tell a worker of a new epoch: where they are unpickled, the worker begins it."""

    def __init__(self, drawn: Any, epoch: int, base_seed: int) -> None:
        self._parts = (drawn, epoch, base_seed)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, self._parts


def _opened(drawn: Any, epoch: int, base_seed: int) -> Any:
    if _this_worker is not None:
        _this_worker.begin(epoch, base_seed)
    return drawn


def _seed(base_seed: int, number: int) -> None:
    """Seed the global generators of a worker as PyTorch does."""
    random.seed(base_seed + number)
    torch.manual_seed(base_seed + number)
    np.random.seed(_numpy_seed(base_seed, number))


def _numpy_seed(base_seed: int, number: int) -> Any:
    words = [number, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
    return np.random.SeedSequence(words).generate_state(4)


class _Seeds:
    """How PyTorch has seeded this worker; compared with `_seed` only where there is a second epoch to begin."""

    def __init__(self, base_seed: int, number: int) -> None:
        self._base_seed, self._number = base_seed, number
        self._torch, self._python, self._numpy = torch.initial_seed(), random.getstate(), np.random.get_state()

    @functools.cached_property
    def are_known(self) -> bool:
        """Whether it is what `_seed` does; a later version of PyTorch may do it in another way."""
        seed = self._base_seed + self._number
        ours = np.random.RandomState(_numpy_seed(self._base_seed, self._number)).get_state()
        return (
            self._torch == seed
            and self._python == random.Random(seed).getstate()  # noqa: S311
            and all(np.array_equal(a, b) for a, b in zip(self._numpy, ours, strict=True))
        )
