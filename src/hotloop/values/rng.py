"""Random number generators: one way to get the state of any of them, to set it and to compare it.

The generators are PyTorch's on the host and on the device, Python's `random`, NumPy's, and those that objects hold.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotloop.device.backend import backend_of
from hotloop.errors import BadArgument
from hotloop.values.tree import leaves, map_leaves, map_tensors

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

_DEEPEST = 4  # how far into a dataset to look for generators: its transform, that one's parts, theirs
_MOST = 64  # entries of a list or dict that are looked at
_SIMPLE = (str, bytes, int, float, Tensor, np.ndarray, type, ModuleType, type(None))


@dataclass(frozen=True)
class Rng:
    """Any generator, as what gets its state and what sets it.

    >>> rng = Rng.of(random.Random(3))
    >>> same_state(rng.get_state(), rng.get_state())
    True
    """

    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]

    @classmethod
    def of(cls, generator: Generator) -> "Rng":
        """That of a generator which somebody holds."""
        if isinstance(generator, random.Random):
            return cls(generator.getstate, generator.setstate)
        if isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            return cls(partial(getattr, bits, "state"), partial(setattr, bits, "state"))
        if isinstance(generator, np.random.RandomState):
            return cls(partial(generator.get_state, legacy=False), generator.set_state)
        return cls(generator.get_state, generator.set_state)


def seed(number: int) -> None:
    """Seed every global generator: PyTorch's on the host and on all devices, Python's and NumPy's.

    >>> seed(0)
    >>> random.random(), torch.rand(()).item()
    (0.8444218515250481, 0.49625658988952637)
    """
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**32:
        raise BadArgument(f"seed={number!r}", fix="give a whole number from 0 to 4,294,967,295")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draw(count: int) -> None:
    """Take so many numbers from the generators of Python and NumPy, so that others come after."""
    np.random.random(count)
    random.randbytes(8 * count)  # noqa: S311


class RngStates:
    """The states of all global generators, and of others that are given, at one moment."""

    def __init__(self, device: torch.device, generators: Iterable[Generator] = ()) -> None:
        self._rngs = rngs_of(device)
        self._states = {name: rng.get_state() for name, rng in self._rngs.items()}
        self._others = [(rng, rng.get_state()) for rng in map(Rng.of, generators)]

    def state_dict(self) -> dict[str, Any]:
        """The states as plain data and tensors; those of other generators are their holders' affair."""
        return dict(self._states)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], device: torch.device) -> "RngStates":
        """What `state_dict` was asked for; the state of a device that is not there now is left out."""
        made = cls(device)
        made._states |= state
        return made

    def restore(self) -> None:
        """Set every generator to its state."""
        for name, rng in self._rngs.items():
            rng.set_state(self._states[name])
        for rng, state in self._others:
            rng.set_state(state)


def host_rngs() -> dict[str, Rng]:
    """The global generators of the host, by name: those that people's code uses without naming one."""
    return {
        "torch": Rng(torch.get_rng_state, torch.set_rng_state),
        "python": Rng(random.getstate, random.setstate),
        "numpy": Rng(_numpy_state, np.random.set_state),
    }


def rngs_of(device: torch.device) -> dict[str, Rng]:
    """The global generators of the host, and that of a device, by its type."""
    rngs, backend = host_rngs(), backend_of(device)
    if backend.has_rng:
        rngs[device.type] = Rng(backend.get_rng_state, backend.set_rng_state)
    return rngs


def quick_rng(device: torch.device) -> tuple[str, Rng]:
    """A generator that steps on a device use, by the calls that get and set its state soonest, and its name."""
    generator = backend_of(device).generator()
    if generator is None:
        return "torch", Rng.of(torch.default_generator)
    try:
        generator.get_offset()
    except RuntimeError:  # that of a simulated GPU draws on the host
        return device.type, Rng.of(generator)
    return device.type, Rng(generator.get_offset, generator.set_offset)  # the seed stays


def same_state(a: Any, b: Any) -> bool:
    """Whether two states of a generator are equal: nothing was drawn from it between them."""
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and all(map(same_state, leaves(a), leaves(b)))
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def with_tensors(state: Any) -> Any:
    """A state of NumPy with tensors for its arrays: `torch.load` reads those without pickle."""
    return map_leaves(state, lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf)


def with_arrays(state: Any) -> Any:
    """The state that `with_tensors` was given."""
    return map_tensors(state, lambda tensor: tensor.cpu().numpy())


def generators_in(roots: Iterable[object]) -> Iterator[Generator]:
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


def _numpy_state() -> Any:
    return np.random.get_state(legacy=False)  # the other form knows of one kind of generator only
