"""`Chance`: everything that a loader draws random numbers from, noted at one moment and put back at another."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hotloop.attributes import Mark, Parts, Restoring, may_become, parts_of, stored_by
from hotloop.data.samplers import KNOWN, generators_of, has_known_sampler, samplers_of
from hotloop.dice import Dice, Generator, host_dice, same

_DEEPEST = 4  # how far into a dataset to look for generators: its transform, that one's parts, theirs
_MOST = 64  # entries of a list or dict that are looked at
_SIMPLE = (str, bytes, int, float, Tensor, np.ndarray, type, ModuleType, type(None))


@dataclass(frozen=True)
class Moment:
    """The random states that matter to a loader, at one moment."""

    torch: Tensor  # of PyTorch's global generator on the host
    python: tuple[Any, ...] | None = None  # of `random`; None where the loader cannot have drawn from it
    numpy: dict[str, Any] | None = None  # of `numpy.random`, likewise
    own: tuple[Any, ...] = ()  # of the generators that the loader, its samplers and its dataset hold
    samplers: tuple[Any, ...] = ()  # of the person's own samplers: what they tell, or what has changed in them

    @classmethod
    def now(cls) -> "Moment":
        """The global states alone."""
        return cls(**{name: dice.take() for name, dice in host_dice().items()})

    def differs(self, other: "Moment") -> list[bool]:
        """For each global generator, whether something was drawn from it between the two."""
        return [not same(getattr(self, name), getattr(other, name)) for name in host_dice()]

    def put(self) -> None:
        """Make these the global states."""
        for name, dice in host_dice().items():
            if (state := getattr(self, name)) is not None:
                dice.put(state)


class Chance:
    """What a loader draws from: the global generators, and those that it holds itself.

    Reading Python's and NumPy's states takes fifty times as long as PyTorch's, so they are read only where the loader
    is not known to leave them alone.
    """

    def __init__(self, loader: object, dataset: object = None) -> None:
        """`dataset` is searched for generators too; it is the one whose items are made in this process."""
        self.in_torch_alone = has_known_sampler(loader) or isinstance(loader, list | tuple)
        samplers = list(samplers_of(loader)) if isinstance(loader, DataLoader) else []
        searched = [] if self.in_torch_alone else samplers or [loader]
        found = [*generators_of(loader), *found_in([*searched, dataset])]
        self._own = [Dice.of(generator) for generator in {id(each): each for each in found}.values()]
        holders = [loader] if not samplers and _is_own(loader) else [s for s in samplers if type(s) not in KNOWN]
        self._samplers = [_Holder(holder) for holder in holders]

    def note(self) -> Moment:
        """The states now, as far as the order of the epoch depends on them."""
        own, samplers = self._taken(), tuple(sampler.told() for sampler in self._samplers)
        if self.in_torch_alone:
            return Moment(torch.get_rng_state(), own=own, samplers=samplers)
        return replace(Moment.now(), own=own, samplers=samplers)

    def note_all(self) -> Moment:
        """The states now, all of them: the making of a batch may draw from any."""
        return replace(Moment.now(), own=self._taken())

    def put(self, moment: Moment) -> None:
        """Put back everything that was noted."""
        moment.put()
        self.put_own(moment)

    def put_own(self, moment: Moment) -> None:
        """Put back what the loader holds itself, and leave the global generators."""
        for dice, state in zip(self._own, moment.own, strict=False):
            dice.put(state)
        for sampler, state in zip(self._samplers, moment.samplers, strict=False):
            sampler.tell(state)

    def fits(self, moment: Moment) -> bool:
        """Whether the loader of the moment held as many generators as this one."""
        return len(moment.own) == len(self._own)

    def _taken(self) -> tuple[Any, ...]:
        return tuple(dice.take() for dice in self._own)


def is_stateful(value: object) -> bool:
    """Whether something tells its state and takes it back."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_own(loader: object) -> bool:
    """Whether a loader is of a class of the person's own, which may count epochs or keep an order."""
    if isinstance(loader, list | tuple | Iterator | DataLoader) or is_stateful(loader):
        return False
    return isinstance(getattr(loader, "__dict__", None), dict)


class _Holder:
    """A sampler, or a loader of the person's own: its state_dict, or the plain attributes that have changed."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._is_stateful = is_stateful(sampler)
        self._marks = {} if self._is_stateful else {name: Mark(parts) for name, parts in self._attributes()}
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
        restoring, stored = Restoring(), stored_by(type(self._sampler).__mro__)
        for name, value in state.items():
            if may_become(self._sampler, name, value, stored):
                self._known.add(name)
                restoring.put(vars(self._sampler), name, copy.deepcopy(value))

    def _attributes(self) -> Iterator[tuple[str, Parts]]:
        for name, value in getattr(self._sampler, "__dict__", {}).items():
            if (parts := parts_of(value)) is not None:
                yield name, parts


def found_in(roots: Iterable[object]) -> Iterator[Generator]:
    """Generators that objects hold, in their attributes or some way below."""
    seen: set[int] = set()
    level: list[object] = list(roots)
    for _ in range(_DEEPEST + 1):
        below: list[object] = []
        for each in level:
            if isinstance(each, _SIMPLE) or id(each) in seen:
                continue
            seen.add(id(each))
            if isinstance(each, Generator):
                yield each
            else:
                below += _parts(each)
        level = below


def _parts(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(islice(value.values(), _MOST))
    if isinstance(value, list | tuple):
        return list(value[:_MOST])
    return list(islice(getattr(value, "__dict__", {}).values(), _MOST))
