"""`LoaderRng`: everything that a loader draws random numbers from, with one `get_state` and one `set_state`."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hotloop.data.samplers import KNOWN, generators_of, has_known_sampler, samplers_of
from hotloop.values.attributes import (
    LITTLE,
    PlainValue,
    Restoring,
    ValueSnapshot,
    may_become,
    plain,
)
from hotloop.values.kinds import ROOM
from hotloop.values.rng import Rng, generators_in, host_rngs, same_state


@dataclass(frozen=True)
class LoaderRngState:
    """The rng states that matter to a loader, at one moment."""

    torch: Tensor  # of PyTorch's global generator on the host
    python: tuple[Any, ...] | None = None  # of `random`; None where the loader cannot have drawn from it
    numpy: dict[str, Any] | None = None  # of `numpy.random`, likewise
    own: tuple[Any, ...] = ()  # of the generators that the loader, its samplers and its dataset hold
    samplers: tuple[Any, ...] = ()  # of the person's own samplers: what they tell, or what has changed in them

    @classmethod
    def now(cls) -> "LoaderRngState":
        """The global states alone."""
        return cls(**{name: rng.get_state() for name, rng in host_rngs().items()})

    def differs(self, other: "LoaderRngState") -> list[bool]:
        """For each global generator, whether something was drawn from it between the two."""
        return [not same_state(getattr(self, name), getattr(other, name)) for name in host_rngs()]

    def restore(self) -> None:
        """Make these the global states."""
        for name, rng in host_rngs().items():
            if (state := getattr(self, name)) is not None:
                rng.set_state(state)


class LoaderRng:
    """What a loader draws from: the global generators, and those that it holds itself.

    Reading Python's and NumPy's states takes fifty times as long as PyTorch's, so they are read only where the loader
    is not known to leave them alone.
    """

    def __init__(self, loader: object, dataset: object = None) -> None:
        """`dataset` is searched for generators too; it is the one whose items are made in this process.

        An `IterableDataset` gives the order as a sampler does, so that its attributes count too.
        """
        self.in_torch_alone = has_known_sampler(loader) or isinstance(loader, list | tuple)
        samplers = list(samplers_of(loader)) if isinstance(loader, DataLoader) else []
        searched = [] if self.in_torch_alone else samplers or [loader]
        found = [*generators_of(loader), *generators_in([*searched, dataset])]
        self._own = [Rng.of(generator) for generator in {id(each): each for each in found}.values()]
        holders = [loader] if not samplers and _is_own(loader) else [s for s in samplers if type(s) not in KNOWN]
        holders += [dataset] if isinstance(dataset, IterableDataset) else []
        self._samplers = [_Holder(holder) for holder in holders]

    def get_state(self) -> LoaderRngState:
        """The states now, as far as the order of the epoch depends on them."""
        own, samplers = self._taken(), tuple(sampler.told() for sampler in self._samplers)
        if self.in_torch_alone:
            return LoaderRngState(torch.get_rng_state(), own=own, samplers=samplers)
        return replace(LoaderRngState.now(), own=own, samplers=samplers)

    def get_full_state(self) -> LoaderRngState:
        """The states now, all of them: the making of a batch may draw from any."""
        return replace(LoaderRngState.now(), own=self._taken())

    def set_state(self, state: LoaderRngState) -> None:
        """Restore every generator."""
        state.restore()
        self.set_own_state(state)

    def set_own_state(self, state: LoaderRngState) -> None:
        """Restore what the loader holds itself, and leave the global generators."""
        for rng, own in zip(self._own, state.own, strict=False):
            rng.set_state(own)
        for sampler, told in zip(self._samplers, state.samplers, strict=False):
            sampler.tell(told)

    def fits(self, state: LoaderRngState) -> bool:
        """Whether the loader of the state held as many generators as this one."""
        return len(state.own) == len(self._own)

    def _taken(self) -> tuple[Any, ...]:
        return tuple(rng.get_state() for rng in self._own)


def loader_rng_restorer(loader: object) -> Callable[[], None]:
    """A callable that restores the present rng state of a DataLoader."""
    if not isinstance(loader, DataLoader):
        return lambda: None
    rng = LoaderRng(loader, loader.dataset)
    return partial(rng.set_own_state, rng.get_state())


def is_stateful(value: object) -> bool:
    """Whether something tells its state and takes it back."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_own(loader: object) -> bool:
    """Whether a loader is of a class of the person's own, which may count epochs or keep an order."""
    if isinstance(loader, list | tuple | Iterator | DataLoader) or is_stateful(loader):
        return False
    return isinstance(getattr(loader, "__dict__", None), dict)


class _Holder:
    """A sampler, an `IterableDataset`, a loader of the person's own: its state_dict, or the attributes that changed."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._is_stateful = is_stateful(sampler)
        self._marks = {} if self._is_stateful else {name: ValueSnapshot(parts) for name, parts in self._attributes()}
        self._known: set[str] = {"epoch"}  # changed, perhaps in an earlier part of the run

    def told(self) -> Any:
        if self._is_stateful:
            return self._sampler.state_dict()
        attributes = list(self._attributes())
        self._known |= {n for n, parts in attributes if n not in self._marks or not self._marks[n].fits(parts)}
        return {name: copy.deepcopy(parts.whole()) for name, parts in attributes if name in self._known}

    def tell(self, state: Any) -> None:
        if self._is_stateful:
            self._sampler.load_state_dict(state)
            return
        restoring = Restoring()
        for name, value in state.items():
            if may_become(self._sampler, name, value):
                self._known.add(name)
                restoring.put(vars(self._sampler), name, copy.deepcopy(value))

    def _attributes(self) -> Iterator[tuple[str, PlainValue]]:
        for name, value in getattr(self._sampler, "__dict__", {}).items():
            if (parts := plain(value, LITTLE if isinstance(self._sampler, IterableDataset) else ROOM)) is not None:
                yield name, parts
