"""A state that was taken and is put back gives the same random numbers again, whosever generator it is."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hotloop.dice import Dice, all_dice, host_dice, same

HELD = [
    *(torch.Generator(), random.Random(3), np.random.RandomState(3), np.random.RandomState(np.random.PCG64(3))),  # noqa: S311
    *(np.random.Generator(getattr(np.random, kind)(3)) for kind in ("MT19937", "PCG64", "Philox", "SFC64")),
]
GLOBAL: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.randn(1).item(),  # of two numbers that are made, one is kept for later
    "python": lambda: random.gauss(0, 1),
    "numpy": np.random.randn,
}


def comes_again(dice: Dice, roll: Callable[[], Any]) -> bool:
    before = dice.take()
    first = [roll() for _ in range(5)]
    assert not same(before, dice.take())
    dice.put(before)
    assert same(before, dice.take()), "what was drawn since has not reached it"
    return [roll() for _ in range(5)] == first


@pytest.mark.parametrize("held", HELD, ids=lambda held: type(held).__name__)
def test_generators_that_somebody_holds(held: Any) -> None:
    if isinstance(held, torch.Generator):
        assert comes_again(Dice.of(held), lambda: torch.randn(1, generator=held).item())
    else:
        assert comes_again(Dice.of(held), held.gauss if isinstance(held, random.Random) else held.normal)


@pytest.mark.parametrize("name", GLOBAL)
def test_global_generators(name: str) -> None:
    GLOBAL[name]()
    assert comes_again(host_dice()[name], GLOBAL[name])
    before = {each: dice.take() for each, dice in host_dice().items()}
    GLOBAL[name]()
    assert [each for each, dice in host_dice().items() if not same(before[each], dice.take())] == [name]


def test_a_generator_is_known_by_itself() -> None:
    one = torch.Generator()
    assert Dice.of(one) == Dice.of(one) != Dice.of(torch.Generator())


@pytest.mark.gpu
def test_the_generator_of_a_gpu() -> None:
    dice = all_dice(torch.device("cuda:0"))
    assert dice.keys() - host_dice().keys() == {"cuda"}
    assert comes_again(dice["cuda"], lambda: torch.randn(1, device="cuda:0").item())
