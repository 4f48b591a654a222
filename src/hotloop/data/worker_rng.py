"""The rng states of a DataLoader's workers, asked for between epochs, and given to workers that take their place.

Workers that persist go on from epoch to epoch with rng states that only they know: global ones, and those of
generators that their copy of the dataset holds. So where their items may be random, they are asked for them between
two epochs, and a run that is resumed starts its workers with them. What else the items change in the dataset cannot be
given to other workers; they tell its names.
"""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from hotloop._torch import ask_workers, dismiss_workers, end_as_garbage, keeps_workers
from hotloop.data.forking import forking
from hotloop.data.loader_rng import LoaderRngState
from hotloop.values.effects import ReachableState, look
from hotloop.values.rng import Rng, generators_in


class _Watching:
    """A collate_fn that remembers, in its worker, what makes the items: a question may come between two epochs."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._first: ReachableState | None = None  # after the first batch, for which files may be opened

    def __call__(self, items: Any) -> Any:
        global _this_worker
        batch = self._collate(items)
        if _this_worker is not self:
            _this_worker, self._first = self, self._look()
        return batch

    def own(self) -> list[Rng]:
        """The generators that the dataset of this worker and what collates its items hold."""
        found = generators_in([_info().dataset, self._collate])
        return [Rng.of(each) for each in {id(each): each for each in found}.values()]

    def told(self) -> bytes:
        """The number of this worker, its rng states, and what differs from after its first batch."""
        assert self._first is not None
        states = replace(LoaderRngState.now(), own=tuple(rng.get_state() for rng in self.own()))
        return pickle.dumps((_info().id, states, self._first.changes(self._look())))

    def _look(self) -> ReachableState:
        seen = look({"dataset": _info().dataset, "collate_fn": self._collate})
        for path in seen.generators:
            seen.values.pop(path, None)
        return seen


_this_worker: _Watching | None = None


def _info() -> Any:
    info = get_worker_info()
    assert info is not None
    return info


def _told() -> bytes | None:
    """In bytes, for tensors would travel through shared memory."""
    return None if _this_worker is None else _this_worker.told()


@dataclass(frozen=True)
class _Starting:
    """A worker_init_fn that ends with the rng states that a worker had."""

    init: Callable[[int], None] | None
    states: tuple[LoaderRngState, ...]
    collate: object  # that this worker has too

    def __call__(self, number: int) -> None:
        if self.init is not None:
            self.init(number)
        if number < len(self.states):
            self.states[number].restore()
            own = self.collate.own() if isinstance(self.collate, _Watching) else []
            for rng, state in zip(own, self.states[number].own, strict=False):
                rng.set_state(state)


class Workers:
    """Workers of a loader that persist, and what they tell of their rng states between two epochs."""

    def __init__(self, loader: DataLoader[Any], *, tell: bool) -> None:
        self._loader = loader
        self._tell = tell
        self._carried: tuple[LoaderRngState, ...] | None = ()  # None: they were not asked yet
        self._changed: set[str] = set()
        if tell:
            loader.__dict__["collate_fn"] = _Watching(loader.collate_fn)

    @property
    def are_there(self) -> bool:
        return keeps_workers(self._loader)

    def carried(self) -> tuple[LoaderRngState, ...]:
        """The states of all workers between two epochs; empty where they are not known."""
        if self._carried is None:
            told = {}
            for answer in filter(None, ask_workers(self._loader, _told)):
                number, told[number], changed = pickle.loads(answer)  # noqa: S301 - of a worker of this process
                self._changed.update(changed)
            self._carried = tuple(told[number] for number in sorted(told))
            if len(told) < self._loader.num_workers:  # one has made no batch yet
                self._carried = ()
        return self._carried

    @property
    def changed(self) -> list[str]:
        """Names of what the items have changed in the dataset of a worker by the end of an epoch."""
        self.carried()
        return sorted(self._changed)

    def listen(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; after the last of them the workers can be asked."""
        self._carried = ()  # in an epoch that is left early, what they do last is not known
        yield from batches
        if self._tell:
            self._carried = None

    def dismiss(self) -> None:
        """Let the next epoch begin with new workers."""
        dismiss_workers(self._loader)
        self._carried = ()

    def start(self, carried: tuple[LoaderRngState, ...]) -> None:
        """Start them with rng states that workers before them had; the loader must have nothing to load."""
        init = self._loader.worker_init_fn
        self._loader.__dict__["worker_init_fn"] = _Starting(init, carried, self._loader.collate_fn)
        try:
            with forking():
                end_as_garbage(iter(self._loader))
        finally:
            self._loader.__dict__["worker_init_fn"] = init
        self._carried = carried
