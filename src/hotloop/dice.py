"""`Dice`: the generators of random numbers, and the one way in which their states are taken, put back and compared."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


@dataclass(frozen=True)
class Dice:
    """A generator of random numbers, as what takes its state and what puts one back.

    >>> dice = Dice.of(random.Random(3))
    >>> same(dice.take(), dice.take())
    True
    """

    take: Callable[[], Any]
    put: Callable[[Any], object]

    @classmethod
    def of(cls, generator: Generator) -> "Dice":
        """That of a generator which somebody holds."""
        if isinstance(generator, random.Random):
            return cls(generator.getstate, generator.setstate)
        if isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            return cls(partial(getattr, bits, "state"), partial(setattr, bits, "state"))
        if isinstance(generator, np.random.RandomState):
            return cls(partial(generator.get_state, legacy=False), generator.set_state)
        return cls(generator.get_state, generator.set_state)


def host_dice() -> dict[str, Dice]:
    """The global generators of the host, by name: those that people's code uses without naming one."""
    return {
        "torch": Dice(torch.get_rng_state, torch.set_rng_state),
        "python": Dice(random.getstate, random.setstate),
        "numpy": Dice(_numpy_state, np.random.set_state),
    }


def all_dice(device: torch.device) -> dict[str, Dice]:
    """The global generators of the host, and that of a device, by its type."""
    dice = host_dice()
    if device.type == "cuda":
        dice["cuda"] = Dice(partial(torch.cuda.get_rng_state, device), partial(torch.cuda.set_rng_state, device=device))
    elif device.type == "mps":
        dice["mps"] = Dice(torch.mps.get_rng_state, torch.mps.set_rng_state)
    return dice


def same(a: Any, b: Any) -> bool:
    """Whether two states of a generator are equal: nothing was drawn from it between them."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def _numpy_state() -> Any:
    return np.random.get_state(legacy=False)  # the other form knows of one kind of generator only
