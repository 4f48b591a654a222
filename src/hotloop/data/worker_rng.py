"""The rng states of a DataLoader's workers, told with each batch, and given to workers that take their place.

Workers that persist go on from epoch to epoch with rng states that only they know: global ones, and those of
generators that their copy of the dataset holds. So where their items may be random, each batch brings along the states
that its worker was left in, and a run that is resumed starts its workers with them. What else the items change in the
dataset cannot be given to other workers; its names come along with a batch now and then.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from hotloop._torch import dismiss_workers, end_as_garbage, keeps_workers
from hotloop.data.forking import forking
from hotloop.data.loader_rng import LoaderRngState
from hotloop.values.effects import ReachableState, look
from hotloop.values.rng import Rng, generators_in


class _Telling:
    """A collate_fn that adds the rng states of the worker that it runs in."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._calls = 0  # in this worker
        self._first: ReachableState | None = None  # at the dataset

    def __call__(self, items: Any) -> Any:
        batch = self._collate(items)
        info = get_worker_info()
        assert info is not None
        version, numbers, gauss = random.getstate()
        # As bytes, which travel faster than a tensor in shared memory or a tuple of numbers.
        python = (version, np.array(numbers, np.int64).tobytes(), gauss)
        host = torch.get_rng_state().numpy().tobytes()
        own = [_sent(rng.get_state()) for rng in self.own()]
        return info.id, host, python, np.random.get_state(legacy=False), own, self._changed(info.dataset), batch

    def own(self) -> list[Rng]:
        """The generators that the dataset of this worker and what collates its items hold."""
        info = get_worker_info()
        assert info is not None
        found = generators_in([info.dataset, self._collate])
        return [Rng.of(each) for each in {id(each): each for each in found}.values()]

    def _changed(self, dataset: object) -> list[str]:
        """What differs from after the first batch in what makes the items; looked at ever more rarely."""
        self._calls += 1
        if self._calls & (self._calls - 1):  # no power of two
            return []
        seen = look({"dataset": dataset, "collate_fn": self._collate})
        for path in seen.generators:
            seen.values.pop(path, None)
        if self._first is None:
            self._first = seen
        return self._first.changes(seen)


@dataclass(frozen=True)
class _Starting:
    """A worker_init_fn that ends with the rng states that a worker had."""

    init: Callable[[int], None] | None
    states: tuple[LoaderRngState, ...]
    telling: object  # the collate_fn, which this worker has too

    def __call__(self, number: int) -> None:
        if self.init is not None:
            self.init(number)
        if number < len(self.states):
            self.states[number].restore()
            own = self.telling.own() if isinstance(self.telling, _Telling) else []
            for rng, state in zip(own, self.states[number].own, strict=False):
                rng.set_state(state)


def _sent(state: Any) -> Any:
    return state.numpy() if isinstance(state, Tensor) else state  # an array is copied, a tensor needs shared memory


class Workers:
    """Workers of a loader that persist, and what they told of their rng states."""

    def __init__(self, loader: DataLoader[Any], *, tell: bool) -> None:
        self._loader = loader
        self._tell = tell
        self._told: dict[int, Any] = {}
        self.changed: set[str] = set()  # names of what the items have changed in the dataset of a worker
        self._all_read = False  # whether the latest epoch was read to its end, so that no state is missing
        if tell:
            loader.__dict__["collate_fn"] = _Telling(loader.collate_fn)

    @property
    def are_there(self) -> bool:
        return keeps_workers(self._loader)

    def carried(self) -> tuple[LoaderRngState, ...]:
        """The states of all workers between two epochs; empty where they are not known."""
        if not self._all_read or len(self._told) < self._loader.num_workers:
            return ()
        return tuple(_state(self._told[number]) for number in range(self._loader.num_workers))

    def listen(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches without what the workers told."""
        return self._heard(batches) if self._tell else batches

    def _heard(self, batches: Iterator[Any]) -> Iterator[Any]:
        if not self._all_read:  # an epoch was left early: what its workers told last is not what they did last
            self._told = {}
        self._all_read = False
        for origin, (number, *told, changed, batch) in batches:
            self._told[number] = told
            self.changed.update(changed)
            yield origin, batch
        self._all_read = True

    def dismiss(self) -> None:
        """Let the next epoch begin with new workers."""
        dismiss_workers(self._loader)
        self._told = {}

    def start(self, carried: tuple[LoaderRngState, ...]) -> None:
        """Start them with rng states that workers before them had; the loader must have nothing to load."""
        init = self._loader.worker_init_fn
        self._loader.__dict__["worker_init_fn"] = _Starting(init, carried, self._loader.collate_fn)
        try:
            with forking():
                end_as_garbage(iter(self._loader))
        finally:
            self._loader.__dict__["worker_init_fn"] = init
        self._told = {number: _told(state) for number, state in enumerate(carried)}
        self._all_read = True


def _state(told: list[Any]) -> LoaderRngState:
    host, (version, numbers, gauss), numpy, own = told
    python = (version, tuple(np.frombuffer(numbers, np.int64).tolist()), gauss)
    states = tuple(torch.from_numpy(state) if isinstance(state, np.ndarray) else state for state in own)
    return LoaderRngState(torch.frombuffer(bytearray(host), dtype=torch.uint8), python, numpy, states)


def _told(state: LoaderRngState) -> list[Any]:
    assert state.python is not None
    version, numbers, gauss = state.python
    python = (version, np.array(numbers, np.int64).tobytes(), gauss)
    return [state.torch.numpy().tobytes(), python, state.numpy, [_sent(own) for own in state.own]]
