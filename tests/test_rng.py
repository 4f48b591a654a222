"""A state that is set again gives the same random numbers, whosever generator it is."""

import io
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hotloop.values.rng import Rng, RngStates, host_rngs, rngs_of, same_state, with_arrays, with_tensors

CPU = torch.device("cpu")
HELD = [
    *(torch.Generator(), random.Random(3), np.random.RandomState(3), np.random.RandomState(np.random.PCG64(3))),  # noqa: S311
    *(np.random.Generator(getattr(np.random, kind)(3)) for kind in ("MT19937", "PCG64", "Philox", "SFC64")),
]
GLOBAL: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.randn(1).item(),  # of two numbers that are made, one is kept for later
    "python": lambda: random.gauss(0, 1),
    "numpy": np.random.randn,
}


def comes_again(rng: Rng, roll: Callable[[], Any]) -> bool:
    before = rng.get_state()
    first = [roll() for _ in range(5)]
    assert not same_state(before, rng.get_state())
    rng.set_state(before)
    assert same_state(before, rng.get_state()), "what was drawn since has not reached it"
    return [roll() for _ in range(5)] == first


@pytest.mark.parametrize("held", HELD, ids=lambda held: type(held).__name__)
def test_generators_that_somebody_holds(held: Any) -> None:
    if isinstance(held, torch.Generator):
        assert comes_again(Rng.of(held), lambda: torch.randn(1, generator=held).item())
    else:
        assert comes_again(Rng.of(held), held.gauss if isinstance(held, random.Random) else held.normal)


@pytest.mark.parametrize("name", GLOBAL)
def test_global_generators(name: str) -> None:
    GLOBAL[name]()
    assert comes_again(host_rngs()[name], GLOBAL[name])
    before = {each: rng.get_state() for each, rng in host_rngs().items()}
    GLOBAL[name]()
    assert [each for each, rng in host_rngs().items() if not same_state(before[each], rng.get_state())] == [name]


def test_a_generator_is_known_by_itself() -> None:
    one = torch.Generator()
    assert Rng.of(one) == Rng.of(one) != Rng.of(torch.Generator())


@pytest.mark.gpu
def test_the_generator_of_a_gpu() -> None:
    rngs = rngs_of(torch.device("cuda:0"))
    assert rngs.keys() - host_rngs().keys() == {"cuda"}
    assert comes_again(rngs["cuda"], lambda: torch.randn(1, device="cuda:0").item())


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "torch, normal": lambda: torch.randn(1).tolist(),  # of two numbers that are made, one is kept for later
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.rand(3).tolist(),
    "numpy, normal": np.random.randn,
}


def drawn(draws: Sequence[Callable[[], Any]]) -> list[Any]:
    return [draw() for draw in draws]


def test_random_states_as_data_and_one_of_a_device_that_is_not_there() -> None:
    state = RngStates(CPU).state_dict()
    first = drawn([*DRAWS.values()])
    RngStates.from_state_dict({**state, "cuda": torch.zeros(16, dtype=torch.uint8)}, CPU).restore()
    assert drawn([*DRAWS.values()]) == first


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "Philox", "SFC64"])
def test_a_state_of_numpy_with_tensors_for_arrays(kind: str) -> None:
    rng = Rng.of(np.random.Generator(getattr(np.random, kind)(3)))
    state, file = rng.get_state(), io.BytesIO()
    torch.save(with_tensors(state), file)
    file.seek(0)
    assert same_state(with_arrays(torch.load(file, weights_only=True)), state)


@pytest.mark.gpu
def test_random_states_of_a_gpu_as_data() -> None:
    device = torch.device("cuda:0")
    before, host = RngStates(device), RngStates(CPU)
    first = torch.rand(3, device=device).tolist()
    second = torch.rand(3, device=device).tolist()
    assert same_state(host.state_dict(), RngStates(CPU).state_dict()), "nothing is drawn on the host"
    before.restore()
    assert torch.rand(3, device=device).tolist() == first
    RngStates.from_state_dict(RngStates(CPU).state_dict(), device).restore()  # of a run without a GPU: it goes on
    assert torch.rand(3, device=device).tolist() == second
    RngStates.from_state_dict(before.state_dict(), device).restore()
    assert torch.rand(3, device=device).tolist() == first
