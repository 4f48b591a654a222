"""A wrong argument is one clear error at the beginning, with its fix."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import BadArgument

DATA = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
LOADER = DataLoader(DATA, 4)


def loop(**options: Any) -> hotloop.Loop:
    model = nn.Linear(2, 1)
    given = {"optimizer": torch.optim.SGD(model.parameters(), 0.1), "loss": nn.MSELoss(), **options}
    return hotloop.Loop(model, given.pop("optimizer"), given.pop("loss"), device="cpu", **given)


def another_scheduler() -> hotloop.Loop:
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    return loop(scheduler=torch.optim.lr_scheduler.StepLR(other, 1))


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no optimizer": (lambda: loop(optimizer=None), "optimizer is a NoneType"),
    "half an accumulation": (lambda: loop(accumulate=1.5), "accumulate=1.5"),
    "a loss in words": (lambda: loop(loss="mse"), "loss='mse' cannot be called"),
    "epochs in words": (lambda: loop().fit(LOADER, epochs="3"), "epochs='3'"),  # type: ignore[arg-type]
    "half an epoch": (lambda: loop().fit(LOADER, epochs=0.5), "epochs=0.5"),  # type: ignore[arg-type]
    "metrics without data": (lambda: loop().fit(LOADER, metrics={"a": max}), "without validate"),
    "metrics in a list": (lambda: loop().evaluate(LOADER, [max]), "metrics is a list"),  # type: ignore[arg-type]
    "the scheduler of another": (another_scheduler, "StepLR is of another optimizer"),
    "a dataset": (lambda: loop().fit(DATA), "TensorDataset gives items"),
    "a dataset in a loop by hand": (lambda: next(loop().batches(DATA)), "TensorDataset gives items"),
}


@pytest.mark.parametrize(("call", "said"), WRONG.values(), ids=WRONG)
def test_it_is_refused_with_a_fix(call: Callable[[], object], said: str) -> None:
    with pytest.raises(BadArgument, match=said) as refusal:
        call()
    assert "fix:" in str(refusal.value)
