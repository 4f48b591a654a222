"""`TrainedObjective` sets gradients to None as `zero_grad` does, or by an optimizer's own."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from hotloop.step.trained_objectives import objectives_of


def with_gradients() -> nn.Linear:
    model = nn.Linear(3, 2)
    model(torch.ones(4, 3)).sum().backward()
    return model


def objective(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(model(batch)).sum()


class Counting(SGD):
    """An optimizer that does more than to set gradients to None."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


def test_gradients_go_and_those_of_others_stay() -> None:
    ours, others = with_gradients(), with_gradients()
    optimizers = [SGD([ours.weight], 0.1), SGD([{"params": [ours.bias], "lr": 1.0}], 0.1)]
    optimizers[0].add_param_group({"params": [late := nn.Parameter(torch.ones(2))]})
    late.grad = torch.ones(2)
    objectives_of(optimizers, objective)[0].zero_grad()
    assert ours.weight.grad is None
    assert ours.bias.grad is None
    assert late.grad is None
    assert others.weight.grad is not None


def test_a_zero_grad_of_its_own_is_called() -> None:
    model = with_gradients()
    optimizer = Counting(model.parameters(), 0.1)
    objectives_of(optimizer, objective)[0].zero_grad()
    assert optimizer.calls == 1
    assert model.weight.grad is None


@pytest.mark.parametrize("of", [lambda optimizer: optimizer, lambda optimizer: Optimizer], ids=["its", "everyone's"])
def test_and_one_that_was_put_in_its_place(of: Callable[[Optimizer], object], monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = with_gradients(), []
    optimizer = SGD(model.parameters(), 0.1)
    monkeypatch.setattr(of(optimizer), "zero_grad", lambda *_, **__: calls.append(1))
    objectives_of(optimizer, objective)[0].zero_grad()
    assert calls == [1]
    assert model.weight.grad is not None
