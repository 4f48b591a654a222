"""What a step changes in Python objects is seen, wherever it lies, and named as the person would name it."""

import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hotloop.values.code import code_of_modules
from hotloop.values.reach import kept_by_capture, look, restored_by_state

calls = 0
numbers = itertools.count()


class Settings:
    beta = 1.0


class Odd(nn.Module):
    """Holds state of every kind."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.queue: deque[float] = deque(maxlen=2)
        self.log: list[float] = []
        self.table: dict[str, int] = {"a": 0}
        self.names: set[int] = set()
        self.hidden = (torch.zeros(2),)
        self.generator = torch.Generator()
        self.numpy = np.random.default_rng(0)
        self.python = random.Random(0)  # noqa: S311
        self.array = np.zeros(3)
        self.cache: Any = None
        self.n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * Settings.beta


def increase_global() -> None:
    global calls  # noqa: PLW0603
    calls += 1


CHANGES: dict[str, Callable[[Odd], object]] = {
    "model.queue": lambda m: m.queue.append(1.0),
    "model.log": lambda m: m.log.append(1.0),
    "model.table": lambda m: m.table.update(a=1),
    "model.names": lambda m: m.names.add(1),
    "model.hidden": lambda m: setattr(m, "hidden", (torch.ones(2),)),
    "model.generator": lambda m: torch.rand(1, generator=m.generator),
    "model.numpy": lambda m: m.numpy.random(),
    "model.python": lambda m: m.python.random(),
    "model.array": lambda m: m.array.__setitem__(0, 1.0),
    "model.total": lambda m: setattr(Odd, "total", Odd.total + 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_state_in_a_module_is_seen_and_named(name: str) -> None:
    model = Odd()
    before = look({"model": model}, restored_by_state([model], []))
    assert before.changes(look({"model": model}, restored_by_state([model], []))) == []
    CHANGES[name](model)
    assert before.changes(look({"model": model}, restored_by_state([model], []))) == [name]


def test_what_trials_restore_is_no_effect() -> None:
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    roots = {"model": model, "optimizer": optimizer}
    before = look(roots, restored_by_state([model], [optimizer]))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.n += 1
    model.mean += 1
    assert before.changes(look(roots, restored_by_state([model], [optimizer]))) == []


def test_the_state_of_an_optimizer_that_nobody_restores_is_an_effect() -> None:
    model = Odd()
    inner = torch.optim.Adam(model.parameters(), 0.1)
    roots, skip = {"model": model, "objective": lambda: inner}, restored_by_state([model], [])
    before = look(roots, skip)
    model(torch.ones(1, 2)).sum().backward()
    inner.step()
    assert before.changes(look(roots, skip)) == ["inner.state"]


def test_a_hook_that_a_call_registers_is_seen() -> None:
    model = nn.Linear(1, 1)
    skip = restored_by_state([model], [])
    before = look({"model": model}, skip)
    model.register_forward_hook(lambda *_: None)
    assert before.changes(look({"model": model}, skip))


def test_closures_globals_and_hooks_are_reached() -> None:
    model, teacher = nn.Linear(2, 2), nn.Linear(2, 2)
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    seen = 0

    def objective(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        increase_global()
        next(numbers)
        with torch.no_grad():
            teacher.bias += 1
        return model(batch).sum()

    roots = {"model": model, "objective": objective, "optimizer": optimizer}
    before = look(roots, restored_by_state([model], [optimizer]))
    objective(model, torch.ones(1, 2)).backward()
    optimizer.step()
    changed = before.changes(look(roots, restored_by_state([model], [optimizer])))
    assert {"seen", "calls", "numbers", "teacher.bias", "average.n_averaged"} <= set(changed)


def test_numbers_that_a_capture_would_freeze_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Odd()
    weight = 0.1

    def objective(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum() * weight

    seen = look({"model": model, "objective": objective}, kept_by_capture)
    assert seen.moved() == []
    weight = 0.2
    model.n = 7
    monkeypatch.setattr(Settings, "beta", 0.5)
    assert set(seen.moved()) == {("weight", 0.1, 0.2), ("model.n", 0, 7), ("Settings.beta", 1.0, 0.5)}


def test_tensors_that_are_made_anew_in_each_step_are_no_effect_for_a_capture() -> None:
    model = Odd()
    model.cache = [torch.zeros(3)]
    before = look({"model": model}, kept_by_capture)
    model.cache = [torch.ones(3)]
    model.hidden = (torch.ones(2),)
    later = look({"model": model}, kept_by_capture)
    assert before.changes(later, tensors=False) == []
    assert before.changes(later) == ["model.cache", "model.hidden"]


def test_code_is_known_by_what_it_does() -> None:
    def scaled(factor: float) -> type[nn.Module]:
        namespace: dict[str, Any] = {"nn": nn}
        exec(  # noqa: S102
            f"class Net(nn.Module):\n def forward(self, x):\n  return x * {factor}\n", namespace
        )
        return namespace["Net"]

    one, same, other = (code_of_modules([scaled(factor)()]) for factor in (1.0, 1.0, 2.0))
    assert one == same != other


def test_what_contains_itself_has_an_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    model = Odd()
    model.cache = endless
    assert look({"model": model}).complete
