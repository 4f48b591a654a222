"""Optimizers that compute the loss themselves train as in a loop by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.errors import BadArgument

X = torch.linspace(-1, 1, 96).view(32, 3)
Y = X.sum(1, keepdim=True).sin()
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 32, 8)]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation: the gradient at a point uphill, for a step from here."""

    def __init__(self, parameters: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        group = self.param_groups[0]
        norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
        uphill = [group["rho"] * p.grad / norm for p in group["params"]]
        for p, step in zip(group["params"], uphill, strict=True):
            p.add_(step)
        with torch.enable_grad():
            closure()
        for p, step in zip(group["params"], uphill, strict=True):
            p.sub_(step).sub_(p.grad, alpha=group["lr"])
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4),
    "lbfgs with a line search": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
    "sam": Sam,
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def by_hand(make: Callable[[Any], torch.optim.Optimizer], clip: float | None) -> nn.Module:
    model = model_of()
    optimizer = make(model.parameters())
    for _ in range(2):
        for x, y in BATCHES:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_the_loop_by_hand(name: str, clip: float | None) -> None:
    model = model_of()
    loop = hotloop.Loop(
        model, OPTIMIZERS[name](model.parameters()), nn.MSELoss(), clip_norm=clip, device="cpu", plan="plain"
    )
    report = loop.fit(BATCHES, epochs=2, progress=False)
    expected = by_hand(OPTIMIZERS[name], clip)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert report.steps == 8


def test_a_run_is_resumed_exactly(tmp_path: Path) -> None:
    weights = []
    for parts in ([3], [1, 3]):
        for epochs in parts:
            model = model_of()
            loop = hotloop.Loop(
                model, torch.optim.LBFGS(model.parameters(), max_iter=3), nn.MSELoss(), device="cpu", plan="plain"
            )
            loop.fit(BATCHES, epochs=epochs, save=tmp_path / str(len(parts)), resume=True, progress=False)
        weights.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_the_default_trains_with_it_too() -> None:
    model = model_of()
    loop = hotloop.Loop(model, torch.optim.LBFGS(model.parameters(), max_iter=2), nn.MSELoss(), device="cpu")
    report = loop.fit(BATCHES, epochs=40, progress=False)
    assert report.epochs[-1].loss < report.epochs[0].loss / 2


@pytest.mark.parametrize(
    ("options", "says"),
    [({"accumulate": 2}, "accumulate=2"), ({"plan": hotloop.Plan("cpu", micro_batch=2)}, "micro_batch=2")],
)
def test_what_it_does_not_go_with_is_refused(options: dict[str, Any], says: str) -> None:
    model = model_of()
    with pytest.raises(BadArgument, match=says):
        hotloop.Loop(model, torch.optim.LBFGS(model.parameters()), nn.MSELoss(), device="cpu", **options)


def test_it_goes_with_no_other_optimizer() -> None:
    model = model_of()
    optimizers = [torch.optim.LBFGS(model[0].parameters()), torch.optim.SGD(model[2].parameters(), 0.1)]
    with pytest.raises(BadArgument, match="no other optimizer"):
        hotloop.Loop(model, optimizers, nn.MSELoss(), device="cpu")
