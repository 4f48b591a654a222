"""Turns let gradients go as `zero_grad` does it, or an optimizer's own; a plateau is given what it watches."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

import hotloop
from hotloop.errors import PlanWarning
from hotloop.loop.turns import turns_of

BATCHES = [(torch.ones(4, 2), torch.ones(4, 1))] * 2


def with_gradients() -> nn.Linear:
    model = nn.Linear(3, 2)
    model(torch.ones(4, 3)).sum().backward()
    return model


def objective(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(model(batch)).sum()


class Counting(SGD):
    """An optimizer that does more than to let gradients go."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


def test_gradients_go_and_those_of_others_stay() -> None:
    ours, others = with_gradients(), with_gradients()
    optimizers = [SGD([ours.weight], 0.1), SGD([{"params": [ours.bias], "lr": 1.0}], 0.1)]
    optimizers[0].add_param_group({"params": [late := nn.Parameter(torch.ones(2))]})
    late.grad = torch.ones(2)
    turns_of(optimizers, objective)[0].clear()
    assert ours.weight.grad is None
    assert ours.bias.grad is None
    assert late.grad is None
    assert others.weight.grad is not None


def test_a_zero_grad_of_its_own_is_called() -> None:
    model = with_gradients()
    optimizer = Counting(model.parameters(), 0.1)
    turns_of(optimizer, objective)[0].clear()
    assert optimizer.calls == 1
    assert model.weight.grad is None


@pytest.mark.parametrize("of", [lambda optimizer: optimizer, lambda optimizer: Optimizer], ids=["its", "everyone's"])
def test_and_one_that_was_put_in_its_place(of: Callable[[Optimizer], object], monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = with_gradients(), []
    optimizer = SGD(model.parameters(), 0.1)
    monkeypatch.setattr(of(optimizer), "zero_grad", lambda *_, **__: calls.append(1))
    turns_of(optimizer, objective)[0].clear()
    assert calls == [1]
    assert model.weight.grad is not None


class Watching(ReduceLROnPlateau):
    """Notes what it is given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.seen: list[float] = []
        super().__init__(*args, **options)

    def step(self, metrics: Any, epoch: Any = None) -> None:
        self.seen.append(float(metrics))
        super().step(metrics, epoch)


def watching(mode: Literal["min", "max"]) -> tuple[hotloop.Loop, Watching]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = Watching(optimizer, mode=mode)
    return hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", scheduler=scheduler), scheduler


def test_a_plateau_of_what_grows_watches_the_one_metric() -> None:
    loop, scheduler = watching("max")
    report = loop.fit(BATCHES, epochs=3, validate=BATCHES, metrics={"mean": lambda o, t: o}, progress=False)
    assert scheduler.seen == [epoch.metrics["mean"] for epoch in report.epochs]


def test_a_plateau_watches_the_validation_loss_or_else_that_of_training() -> None:
    loop, scheduler = watching("min")
    report = loop.fit(BATCHES, epochs=2, validate=BATCHES, progress=False)
    report = loop.fit(BATCHES, epochs=2, progress=False)
    assert scheduler.seen[2:] == [epoch.loss for epoch in report.epochs]
    assert len(scheduler.seen) == 4


def test_a_plateau_that_nobody_steps_is_told_of() -> None:
    loop, scheduler = watching("min")
    for epoch in range(2):
        with pytest.warns(PlanWarning, match="was not stepped between two epochs") if epoch else nullcontext():
            for batch in loop.batches(BATCHES):
                loop.step(batch)
    with warnings.catch_warnings(action="error"):
        for _ in range(2):
            scheduler.step(1.0)
            for batch in loop.batches(BATCHES):
                loop.step(batch)
