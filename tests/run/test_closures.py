"""Optimizers that compute the loss themselves train as in a loop by hand."""

import torch
from torch import Tensor, nn

import hotloop

from .test_state import Script, assert_resumed_alike

X = torch.linspace(-1, 1, 96).view(32, 3)
Y = X.sum(1, keepdim=True).sin()
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 32, 8)]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")


def test_with_clipping_it_trains_as_the_loop_by_hand() -> None:
    """Without it, such optimizers are in the styles."""
    model, expected = model_of(), model_of()
    optimizer = lbfgs(expected)
    for x, y in BATCHES * 2:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(expected(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
            return loss

        optimizer.step(closure)
    loop = hotloop.Loop(model, lbfgs(model), nn.MSELoss(), clip_norm=0.05, device="cpu", plan="plain")
    assert loop.fit(BATCHES, epochs=2, progress=False).steps == 8
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_run_is_resumed_exactly() -> None:
    def build() -> Script:
        model = model_of()
        return Script(hotloop.Loop(model, lbfgs(model), nn.MSELoss(), device="cpu", plan="plain"), BATCHES)

    assert_resumed_alike(build, [5], 2)
