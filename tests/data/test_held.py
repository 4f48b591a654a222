"""Large batches of a list stay on the device, as long as nobody changes them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.data.held import LARGE_BATCH, HeldBatches

CPU = torch.device("cpu")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Batches that were moved to the device."""
    moved: list[Any] = []

    def move(batch: Any, device: torch.device) -> Any:
        moved.append(batch)
        return [tensor.clone() for tensor in batch]

    monkeypatch.setattr("hotloop.data.held.move", move)
    return moved


def batch_of(number: float, size: int = LARGE_BATCH) -> list[Tensor]:
    return [torch.full((size // 4,), number), torch.arange(3)]


def test_from_the_third_epoch_on_nothing_is_copied_there(copies: list[Any]) -> None:
    held, batches = HeldBatches(CPU, 2), [batch_of(1.0), batch_of(2.0)]
    for _ in range(5):
        for batch in batches:
            found = held.moved(batch)
            assert all(map(torch.equal, found, batch))
            found[0].zero_()  # it belongs to the step
    assert len(copies) == 4, "once, and once to be kept"


def test_one_batch_that_is_there_often_is_kept_once(copies: list[Any]) -> None:
    held, batch = HeldBatches(CPU, 8), batch_of(1.0)
    for each in [batch] * 8:
        held.moved(each)
    assert len(copies) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch[0].add_(1),
        lambda batch: batch[0].numpy().fill(7.0),
        lambda batch: batch[0].data.fill_(7.0),
        lambda batch: batch.__setitem__(0, torch.zeros(LARGE_BATCH // 4)),
    ],
)
def test_a_change_is_seen(copies: list[Any], change: Callable[[list[Tensor]], object]) -> None:
    held, batch = HeldBatches(CPU, 1), batch_of(1.0)
    for _ in range(3):
        held.moved(batch)
    change(batch)
    for _ in range(3):
        assert all(map(torch.equal, held.moved(batch), batch))
    assert len(copies) == 4


def test_other_batches_take_the_place_of_those_before(copies: list[Any]) -> None:
    held = HeldBatches(CPU, 2)
    for number in range(6):
        held.moved(batch_of(float(number)))
    assert len(held._held) <= 2


@pytest.mark.parametrize(
    "batch",
    [
        batch_of(1.0, LARGE_BATCH // 2),
        [torch.zeros(LARGE_BATCH).requires_grad_()],
        [torch.eye(2048).to_sparse(), torch.zeros(LARGE_BATCH)],
        {"x": torch.zeros(LARGE_BATCH), "name": "a"},
    ],
    ids=["small", "with a gradient", "sparse", "not of tensors alone"],
)
def test_what_is_copied_each_time(batch: Any) -> None:
    held = HeldBatches(CPU, 1)
    for _ in range(3):
        held.moved(batch)
    assert not held._held


@pytest.mark.gpu
def test_on_a_gpu_a_whole_table_in_each_epoch_trains_as_by_hand() -> None:
    x, y = torch.randn(LARGE_BATCH // 32, 8), torch.randn(LARGE_BATCH // 32, 1)
    losses = []
    for hold in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cuda", plan="plain")
        batches: Any = [(x, y)] if hold else Again([(x, y)])
        report = loop.fit(batches, epochs=6, progress=False, monitor=False)
        losses.append([epoch.loss for epoch in report.epochs])
    assert losses[0] == losses[1]


class Again:
    """A loader of which nobody knows that it always gives the same."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)
