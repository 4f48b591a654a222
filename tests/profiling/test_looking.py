"""A look at a step: lines, phases, counts and memory."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from hotloop.profiling.operation_log import LoggedOperation, OperationLog
from hotloop.profiling.residents import thinned


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)  # one
        hidden = hidden * 3  # times
        return self.two(hidden)  # two


def line(mark: str) -> int:
    """The line of this file that ends with a mark."""
    source = inspect.getsource(inspect.getmodule(line)).splitlines()
    return next(number for number, text in enumerate(source, 1) if text.endswith(f"# {mark}"))


@pytest.fixture
def looked() -> tuple[OperationLog, nn.Module]:
    model, device = Net(), torch.device("cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    inputs = torch.ones(5, 4)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(inputs).sum()  # loss
        loss.backward()  # backward
        optimizer.step()  # update

    step()
    look = OperationLog(device, lambda: [optimizer])
    before = register_optimizer_step_pre_hook(lambda *_: look.begin_update())
    after = register_optimizer_step_post_hook(lambda *_: look.end_update())
    with look.looking():
        step()
    before.remove()
    after.remove()
    return look, model


def found(look: OperationLog, name: str, phase: str) -> list[LoggedOperation]:
    return [seen for seen in look.seen if seen.name == f"aten::{name}" and seen.phase == phase]


def test_forward_operations_stand_at_their_line(looked) -> None:
    look, _ = looked
    assert [seen.site.line for seen in found(look, "addmm", "forward")] == [line("one"), line("two")]
    assert [seen.site.line for seen in found(look, "mul", "forward")] == [line("times")]
    assert [seen.site.line for seen in found(look, "sum", "forward")] == [line("loss")]
    assert all(seen.site.file == __file__ for seen in look.seen)


def test_backward_operations_stand_at_the_line_of_their_forward(looked) -> None:
    look, _ = looked
    assert [seen.site.line for seen in found(look, "mul", "backward")] == [line("times")]
    assert [seen.site.line for seen in found(look, "mm", "backward")] == [line("two"), line("two"), line("one")]


def test_updates_stand_at_the_line_of_the_step(looked) -> None:
    look, _ = looked
    assert {seen.site.line for seen in look.seen if seen.phase == "update"} == {line("update")}
    assert found(look, "lerp_", "update")


def test_shapes_and_operations_are_counted(looked) -> None:
    look, _ = looked
    first = found(look, "addmm", "forward")[0]
    assert (first.shapes, first.flops, first.precision) == ("8, 5×4, 4×8", 2 * 5 * 4 * 8, "fp32")


def test_memory_is_told_apart(looked) -> None:
    look, model = looked
    weights = sum(p.nbytes for p in model.parameters())
    first, *_, last = look.memory.samples()
    assert (first.parameters, first.gradients) == (weights, weights)
    assert last.gradients == weights
    assert all(sample.parameters == weights for sample in look.memory.samples())
    assert first.optimizer >= 2 * weights
    phases = [sample.phase for sample in look.memory.samples()]
    assert {"forward", "backward", "update"} <= set(phases)
    assert max(sample.activations for sample in look.memory.samples()) >= 5 * 8 * 4  # the hidden layer
    assert min(sample.gradients for sample in look.memory.samples()) == 0  # after zero_grad


def test_what_is_computed_once_more_stands_at_its_own_line() -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    look = OperationLog(torch.device("cpu"), list)

    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin() @ weight  # block

    with look.looking():
        checkpoint(block, torch.ones(2, 3), use_reentrant=False).sum().backward()
    assert {seen.site.line for seen in found(look, "sin", "backward")} == {line("block")}


def test_what_a_loader_does_is_data() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(6.0), batch_size=2)
    look = OperationLog(torch.device("cpu"), list)
    with look.looking():
        for batch in loader:
            batch + 1
    assert len(found(look, "stack", "data")) == 3
    assert len(found(look, "add", "forward")) == 3


def test_it_leaves_nothing_behind() -> None:
    before = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    look = OperationLog(torch.device("cpu"), list)
    with pytest.raises(ZeroDivisionError), look.looking():
        raise ZeroDivisionError
    torch.ones(1) + 1
    assert look.seen == []
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is before


@given(st.lists(st.integers(0, 10**6), max_size=400), st.integers(4, 100))
def test_thinning_keeps_the_ends_the_order_and_the_peak(values: list[int], limit: int) -> None:
    few = thinned(values, limit)
    assert len(few) <= max(limit, 2)
    assert few == sorted(set(few))
    if values:
        assert (few[0], few[-1]) == (0, len(values) - 1)
        assert max(values[place] for place in few) == max(values)
