"""`TrainingStep`: whatever the plan, the training is that of plain PyTorch, as nearly as its rounding allows."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.levers.channels_last import to_memory_format
from hotloop.objective.objectives import Objective
from hotloop.plan import Plan
from hotloop.step.eager import total
from hotloop.step.retry import OutOfMemory
from hotloop.step.trained_objectives import TrainedObjective
from hotloop.step.training import TrainingStep

PLAIN = Plan("cpu")
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        # Random numbers are drawn in the order of memory, so that a mask of images would be another in another layout.
        return x + self.conv(x).relu() * F.dropout(x.mean((2, 3)), 0.1)[:, :, None, None]


class Net(nn.Module):
    """Convolutions, blocks that repeat, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 6, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def batches(sizes: tuple[int, ...] = (8, 8, 8, 8, 3, 8, 8, 8, 8, 3)) -> Iterator[Batch]:
    """Two epochs, each with a tail."""
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        x = torch.randn(size, 3, 6, 6, generator=generator)
        yield x, x.mean((2, 3)).argmax(1)


def objective(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def step_of(
    plan: Plan, model: nn.Module, optimizer: Optimizer, goal: Objective = objective, **options: Any
) -> TrainingStep:
    step = TrainingStep(model, (TrainedObjective("loss", goal, (optimizer,)),), plan, **options)
    step.levers.apply()
    if plan.channels_last:
        to_memory_format([model], [optimizer], torch.channels_last)
    return step


def trained(step: TrainingStep) -> list[float]:
    torch.manual_seed(2)  # the same dropout
    losses = [total(step(batch)).item() for batch in batches()]
    step.end_epoch()
    return losses


def by_hand(model: nn.Module, optimizer: Optimizer) -> list[float]:
    torch.manual_seed(2)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = objective(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_near(step: TrainingStep, losses: list[float], other: nn.Module, expected: list[float]) -> None:
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-5)
    for ours, theirs in zip(step.model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-4)


FULL = replace(PLAIN, channels_last=True, fused=True, checkpointing=True, tf32=True, cudnn_benchmark=True)


@pytest.mark.parametrize("build", [adam, sgd])
def test_a_plan_is_nearly_the_same_training(build: Callable[[nn.Module], Optimizer]) -> None:
    ours, theirs = Net(), Net()
    step = step_of(FULL, ours, build(ours))
    assert_near(step, trained(step), theirs, by_hand(theirs, build(theirs)))


def test_accumulation_and_clipping_with_a_plan() -> None:
    ours, theirs = Net(), Net()
    step = step_of(replace(FULL, accumulate=3, clip_norm=0.5), ours, sgd(ours))
    plain = step_of(replace(PLAIN, accumulate=3, clip_norm=0.5), theirs, sgd(theirs))
    assert_near(step, trained(step), theirs, trained(plain))
    assert step.counts.steps == plain.counts.steps == 4


def test_channels_last_reaches_the_model() -> None:
    seen: list[bool] = []
    model = Net()

    def looking(model: nn.Module, batch: Batch) -> Tensor:
        seen.append(batch[0].is_contiguous(memory_format=torch.channels_last))
        return objective(model, batch)

    step = step_of(replace(PLAIN, channels_last=True), model, sgd(model), looking)
    trained(step)
    assert seen == [True] * 10
    assert model.stem.weight.is_contiguous(memory_format=torch.channels_last), "also after updates"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of batches that run as compiled, in a compiler that leaves an objective as it is."""
    sizes: list[int] = []

    def compiling(inner: Objective, **options: Any) -> Objective:
        def counting(model: nn.Module, batch: Batch) -> Any:
            sizes.append(len(batch[0]))
            return inner(model, batch)

        return counting

    monkeypatch.setattr(torch, "compile", compiling)
    return sizes


def test_only_batches_of_the_first_form_are_compiled(compiled: list[int]) -> None:
    ours, theirs = Net(), Net()
    step = step_of(replace(PLAIN, compile="default"), ours, adam(ours))
    assert trained(step) == by_hand(theirs, adam(theirs)), "tails belong to the training"
    assert compiled == [8] * 8


def test_what_was_compiled_before_is_used_again(compiled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = Net(), replace(PLAIN, compile="default")
    before = step_of(plan, model, adam(model))
    monkeypatch.delattr(torch, "compile")
    trained(step_of(plan, model, adam(model), compiled=before.compiled))
    assert compiled == [8] * 8


def test_a_batch_that_cannot_be_compared_is_not_compiled(compiled: list[int]) -> None:
    model = Net()
    step = step_of(replace(PLAIN, compile="default"), model, adam(model))
    for x, y in batches():
        step((x, y, {"a set"}))
    assert step.counts.steps == 10
    assert compiled == []


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler itself uses what PyTorch has deprecated
def test_a_compiled_step_is_nearly_the_same_training() -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.Tanh(), nn.Linear(8, 3))

    ours, theirs = network(), network()
    step = step_of(replace(PLAIN, compile="default"), ours, sgd(ours))
    expected = by_hand(theirs, sgd(theirs))
    torch._dynamo.utils.counters.clear()
    try:
        losses = trained(step)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    finally:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
    assert_near(step, losses, theirs, expected)
    assert graphs == 1, "it was compiled, and for one form of batch only"


@pytest.mark.usefixtures("captures_on_the_host")
@pytest.mark.parametrize("plan", [PLAIN, FULL], ids=["plain", "all"])
def test_training_goes_on_where_a_step_cannot_be_captured(plan: Plan) -> None:
    """Also in the middle of a window, whose batches are not lost."""
    ours, theirs = Net(), Net()
    plan = replace(plan, accumulate=2)
    step, plain = step_of(replace(plan, graph=1), ours, sgd(ours)), step_of(plan, theirs, sgd(theirs))
    torch.manual_seed(2)
    losses, captures = [], []
    for batch in batches():
        losses.append(total(step(batch)).item())
        captures.append((step.captured is not None, step.is_between_windows))
    step.end_epoch()
    assert_near(step, losses, theirs, trained(plain))
    assert captures[1:3] == [(True, True), (False, False)], "it is given up in the middle of a window"
    assert "random numbers on the host" in step.obstacle
    assert step.plan == plan, "only the graph is given up"
    assert step.counts.steps == plain.counts.steps == 5


def test_named_losses_of_objectives_that_alternate() -> None:
    """Two objectives with an optimizer each, as a GAN has them."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})

    def goal(name: str, model: Any, batch: Tensor) -> dict[str, Tensor]:
        out = model[name](batch)
        return {"square": out.square().mean(), "size": 0.1 * out.abs().mean()}

    objectives = tuple(TrainedObjective(name, partial(goal, name), (sgd(model[name]),)) for name in ("a", "b"))
    step = TrainingStep(model, objectives, replace(PLAIN, fused=True))
    step.levers.apply()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parts = step(torch.ones(5, 4))
    assert list(parts) == ["a/square", "a/size", "b/square", "b/size"]
    torch.testing.assert_close(total(parts), torch.stack(list(parts.values())).sum())
    assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_with_a_plan(precision: Any) -> None:
    results = []
    for plan in (PLAIN, FULL):
        model = Net()
        step = step_of(replace(plan, precision=precision, clip_norm=1.0), model, adam(model))
        results.append(trained(step))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert step.counts.skipped == 0
    torch.testing.assert_close(*results, rtol=0.05, atol=0.01)


class Deep(nn.Module):
    """Blocks that repeat; the second objective runs out of memory until their activations are checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(2)])
        self.heads = nn.ModuleDict({"first": nn.Linear(3, 1), "second": nn.Linear(3, 1)})

    def forward(self, x: Tensor, head: str) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if head == "second" and "forward" not in vars(self.blocks[0]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        output: Tensor = self.heads[head](x)
        return output


@pytest.mark.filterwarnings("ignore::hotloop.errors.MemoryWarning")
def test_a_plan_that_changes_between_two_objectives_loses_no_loss() -> None:
    model = Deep()
    seen: list[set[str]] = []

    def goal(name: str, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0], name).square().mean()

    objectives = tuple(
        TrainedObjective(name, partial(goal, name), (torch.optim.SGD(model.heads[name].parameters(), 0.1),))
        for name in ("first", "second")
    )
    memory = OutOfMemory([model], torch.device("cpu"), relieve=lambda: step.relieve())  # noqa: PLW0108  # made below
    step = TrainingStep(model, objectives, PLAIN, see=lambda parts, count: seen.append(set(parts)), memory=memory)
    parts = step((torch.ones(1, 3), torch.ones(1, 1)))
    assert step.plan.checkpointing
    assert set(parts) == {"first", "second"}
    assert seen == [{"first", "second"}]
    step.levers.revert()
