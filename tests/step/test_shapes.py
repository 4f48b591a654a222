"""Batches of many shapes: each that comes again and again gets a graph, the training is the same, memory is bounded."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.step import captured
from hotloop.step.inspection import Inspection, departure

EPOCHS = 8
pytestmark = [pytest.mark.usefixtures("soon"), pytest.mark.simulated]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes are captured when they come for the third time."""
    monkeypatch.setattr(captured, "SHAPE_FROM", 3)


class Reader(nn.Module):
    """Reads texts of any length."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, width)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.words(tokens).mean(1))


def texts(lengths: list[int]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(0, 50, (4, length), generator=generator) for length in lengths]
    return [(tokens, tokens[:, :1] / 50) for tokens in made]


def losses(plan: hotloop.Plan | str, lengths: list[int], epochs: int = EPOCHS) -> tuple[Tensor, hotloop.Loop]:
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, capturable=True)
    loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cuda", plan=plan)
    seen = [loop.step(batch) for _ in range(epochs) for batch in loop.batches(texts(lengths))]
    return torch.stack(seen), loop


def graphs(loop: hotloop.Loop) -> int:
    captured = loop._core.switch.step.captured
    return len(captured._others._graphs) + len(captured._graphs)


@pytest.mark.gpu
def test_texts_of_many_lengths_are_captured_and_the_training_is_the_same() -> None:
    lengths = [5, 9, 7, 5, 11, 9]
    plain, _ = losses("plain", lengths)
    graphed, loop = losses(hotloop.Plan("cuda", graph=1), lengths)
    assert loop.plan.graph == 1
    assert graphs(loop) == len(set(lengths))
    torch.testing.assert_close(graphed, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_there_are_only_so_many_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_SHAPES", 3)
    lengths = list(range(3, 15))
    plain, _ = losses("plain", lengths)
    graphed, loop = losses(hotloop.Plan("cuda", graph=1), lengths)
    assert graphs(loop) <= 4
    torch.testing.assert_close(graphed, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_tail_is_captured_in_the_end() -> None:
    lengths = [6, 6, 6, 6, 3]
    _, loop = losses(hotloop.Plan("cuda", graph=1), lengths)
    assert graphs(loop) == 2


@pytest.mark.gpu
def test_shapes_that_do_not_come_again_run_eagerly() -> None:
    plain, _ = losses("plain", list(range(3, 60)), epochs=1)
    graphed, loop = losses(hotloop.Plan("cuda", graph=1), list(range(3, 60)), epochs=1)
    assert graphs(loop) == 0
    torch.testing.assert_close(graphed, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_memory_does_not_grow_with_the_number_of_shapes() -> None:
    def reserved(lengths: list[int]) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        model = Reader(2048)
        optimizer, plan = torch.optim.SGD(model.parameters(), 1e-3), hotloop.Plan("cuda", graph=1)
        loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cuda", plan=plan)
        for _ in range(EPOCHS):
            for batch in loop.batches(texts(lengths)):
                loop.step(batch)
        assert graphs(loop) == len(set(lengths))
        return torch.cuda.memory_reserved() - before

    few, many = reserved([20, 30]), reserved(list(range(20, 32)))
    assert many < 2 * few


def test_the_operations_of_two_shapes_may_differ() -> None:
    first = Inspection([(("add", (1,)), None), (("mul", (2,)), None)], form=1)
    other = [(("add", (3,)), None), (("pad", (9,)), None)]
    assert departure(first, Inspection(other, form=2)) is None
    assert departure(first, Inspection(other, form=1)) is not None
