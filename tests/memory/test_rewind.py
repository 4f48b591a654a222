"""`Rewind`: whatever a pass has changed is as before it, to the bit, whether the pass was looked at or not."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hotloop.memory import rewind as module
from hotloop.memory.rewind import FIRST_LOOKS, LOOK_EVERY, Rewind

CPU = torch.device("cpu")


class Counting(nn.Module):
    """Writes to one buffer, puts another in place of one, and adds one when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("exchanged", torch.zeros(2))
        self.register_buffer("later", None)
        self.register_buffer("still", torch.ones(3))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1
        self.exchanged.mul_(2)  # the old tensor, before another takes its place
        self.exchanged = self.exchanged + 1
        if self.later is None:
            self.later = torch.zeros(1)
        self.later += torch.rand(1, generator=self.generator)
        return x


class Buffered(nn.Module):
    """Statistics that a kernel writes without a sign, as that of BatchNorm does, and no counter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, training=True)


def everything(model: nn.Module) -> list[Any]:
    buffers = {name: (id(b), None if b is None else b.clone()) for name, b in model._buffers.items()}
    inner = [b.clone() for b in model.buffers()]
    numpy = np.random.get_state()
    own = getattr(model, "generator", torch.Generator()).get_state()
    return [buffers, inner, torch.get_rng_state(), random.getstate(), numpy[1].tolist(), numpy[2:], own]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def torch_numbers() -> None:
    torch.rand(3)


def python_numbers() -> None:
    random.random()  # noqa: S311


def numpy_numbers() -> None:
    np.random.rand()


@pytest.mark.parametrize("build", [Counting, Buffered, lambda: nn.BatchNorm1d(3), lambda: nn.Sequential(Counting())])
@pytest.mark.parametrize("draw", [torch_numbers, python_numbers, numpy_numbers])
@pytest.mark.parametrize("before", [0, 1, FIRST_LOOKS, FIRST_LOOKS + 3, LOOK_EVERY])
def test_a_pass_that_failed_has_left_nothing(
    build: Callable[[], nn.Module], draw: Callable[[], None], before: int
) -> None:
    model = build()
    rewind = Rewind([model], CPU)

    def work() -> None:
        draw()
        model(torch.randn(4, 3))

    for _ in range(before):
        rewind.note()
        work()
        rewind.settle()
    for _ in range(2):  # also twice in a row
        rewind.note()
        noted = everything(model)
        work()
        rewind.put()
        assert same(everything(model), noted)
    work()
    assert not same(everything(model), noted)


def test_only_what_passes_change_is_noted_later() -> None:
    """Else every step would pay for it."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.register_buffer("table", torch.zeros(1000))
    rewind = Rewind([model], CPU)
    for _ in range(FIRST_LOOKS):
        rewind.note()
        model(torch.zeros(2, 3))
        rewind.settle()
    assert sorted(len(tensors) for tensors, _ in rewind._written) == [1, 2]  # one count, two means: copied by kind
    assert rewind._cast == []
    assert rewind._changing == []


def test_what_begins_later_is_seen_in_a_later_look() -> None:
    model = nn.BatchNorm1d(3).eval()
    rewind = Rewind([model], CPU)

    def step() -> None:
        rewind.note()
        model(torch.randn(4, 3))
        rewind.settle()

    for _ in range(FIRST_LOOKS + 2):
        step()
    model.train()
    rewind.look_again()
    step()
    rewind._passes = FIRST_LOOKS + 2  # past the looks
    rewind.note()
    before = model.running_mean.clone()
    model(torch.randn(4, 3))
    assert not torch.equal(model.running_mean, before)
    rewind.put()
    assert torch.equal(model.running_mean, before)


def test_memory_that_runs_out_while_it_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.BatchNorm1d(3)
    rewind = Rewind([model], CPU)
    clone, fails = Tensor.clone, [2]

    def clone_or_not(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if fails[0]:
            fails[0] -= 1
            raise torch.OutOfMemoryError("full")
        return clone(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "clone", clone_or_not)
    rewind.note()
    model(torch.randn(4, 3))
    rewind.put()
    assert torch.equal(model.running_mean, torch.zeros(3))
    assert fails == [0]


def test_weights_whose_shape_is_not_known_yet() -> None:
    model = nn.LazyBatchNorm1d()
    rewind = Rewind([model], CPU)
    rewind.note()
    model(torch.randn(4, 3))
    rewind.settle()
    before = model.running_mean.clone()
    rewind.note()
    model(torch.randn(4, 3))
    rewind.put()
    assert torch.equal(model.running_mean, before), "what the first pass has made is restored after the next"


def test_two_models_that_share_a_part() -> None:
    part = nn.BatchNorm1d(3)
    rewind = Rewind([part, nn.Sequential(part)], CPU)
    rewind.note()
    part(torch.randn(4, 3))
    rewind.put()
    assert torch.equal(part.running_mean, torch.zeros(3))
    assert module.SMALL > 0


@pytest.mark.gpu
def test_a_pass_on_the_gpu_without_a_wait(no_waits: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).cuda()
    rewind = Rewind([model], torch.device("cuda:0"))
    x = torch.randn(8, 3, device="cuda")
    model(x)
    with no_waits():
        for _ in range(FIRST_LOOKS + 2):
            rewind.note()
            model(x)
            rewind.settle()
    rewind.note()
    before = [b.clone() for b in model.buffers()]
    first = model(x)
    rewind.put()
    assert all(map(torch.equal, model.buffers(), before))
    assert torch.equal(model(x), first), "the same dropout"


def test_passes_that_change_nothing_need_no_note_until_the_next_look() -> None:
    model = nn.Linear(3, 3)
    rewind = Rewind([model], CPU)
    for _ in range(FIRST_LOOKS):
        assert rewind.quiet == 0
        rewind.note()
        model(torch.zeros(2, 3))
        rewind.settle()
    assert rewind.quiet == LOOK_EVERY - FIRST_LOOKS
    rewind.quiet = 0  # as after so many steps
    rewind.note()
    before = torch.get_rng_state()
    torch.rand(1)  # the first pass that draws a number
    rewind.put()
    assert torch.equal(torch.get_rng_state(), before)
    rewind.note()
    random.random()  # noqa: S311  # Python's rng state is noted only where it was seen to change
    rewind.settle()
    assert rewind.quiet == 0
    rewind.look_again()
    assert rewind.quiet == 0
