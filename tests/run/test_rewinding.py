"""Out of memory in the middle of a run: the step is repeated as if the attempt had not been, or a word is said."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.errors import MemoryWarning, PlanWarning

FAILS_AT = 10  # the step whose first attempt runs out of memory
STEPS = 12


class Net(nn.Module):
    """Calls `late` in each forward pass from a later step on; one attempt runs out of memory afterwards."""

    def __init__(self, late: Callable[["Net"], object], begins: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(1))
        self.late, self.begins = late, begins

    def forward(self, x: Tensor) -> Tensor:
        if CLOCK["step"] >= self.begins:
            self.late(self)
        out = self.layer(x)
        if CLOCK["step"] == FAILS_AT and not CLOCK["failed"] and out.requires_grad and len(x) == 4:
            CLOCK["failed"] = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return out


CLOCK = {"step": 0, "failed": False}


def train(model: nn.Module) -> None:
    """Train for some steps on even batches, each in a list."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu", plan="plain")
    CLOCK.update(step=0, failed=False)
    for given in loop.batches([[torch.full((4, 3), float(i)), torch.ones(4, 1)] for i in range(STEPS)]):
        CLOCK["step"] += 1
        loop.step(given)


def test_torch_numbers_that_begin_late_are_drawn_once() -> None:
    with pytest.warns(MemoryWarning, match="out of memory with 4 items"):
        train(Net(lambda net: torch.rand(1)))
    after = torch.rand(3)
    torch.manual_seed(1)
    for _ in range(2 + 2 * 3):  # steps 8 and 9 whole, steps 10 to 12 in two micro-batches; the failed attempt: nothing
        torch.rand(1)
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize(
    ("late", "named"),
    [
        (lambda net: random.random(), "rng of python"),  # noqa: S311
        (lambda net: np.random.rand(), "rng of numpy"),
        (lambda net: net.seen.add_(1), "seen"),
        (lambda net: setattr(net, "count", getattr(net, "count", 0) + 1), "count"),
    ],
    ids=["python", "numpy", "buffer", "attribute"],
)
def test_what_begins_late_and_cannot_be_restored_is_named(late: Callable[[Net], object], named: str) -> None:
    with pytest.warns(MemoryWarning) as told:
        train(Net(late))
    assert any(named in str(each.message) and "not restored" in str(each.message) for each in told)


@pytest.mark.parametrize(
    "early",
    [lambda net: random.random(), lambda net: np.random.rand(), lambda net: net.seen.add_(1)],  # noqa: S311
    ids=["python", "numpy", "buffer"],
)
def test_what_every_step_does_is_restored_without_a_word(early: Callable[[Net], object]) -> None:
    with pytest.warns(MemoryWarning) as told:
        train(Net(early, begins=0))
    assert not any("not restored" in str(each.message) for each in told)


def test_state_outside_the_model_that_a_repetition_changes_twice_is_named() -> None:
    seen = []
    model = Net(lambda net: seen.append(1))

    with pytest.warns((MemoryWarning, PlanWarning)) as told:
        train(model)
    assert any("seen: your code changes that in each call" in str(each.message) for each in told)
