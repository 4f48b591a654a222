"""Weights that are counted on the device: in captured windows, in several steps at once, and without a wait."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hotloop import Loop, Plan

pytestmark = pytest.mark.gpu
WEIGHT = torch.tensor([0.3, 1.0, 4.0])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def data(rows: int) -> TensorDataset:
    """Targets of which some batches have many, some few and some none that count."""
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    y[torch.rand(rows, generator=torch.Generator().manual_seed(2)) < 0.5] = -100
    y[24:32] = -100
    return TensorDataset(x, y)


def by_hand(rows: int, batch: int, accumulate: int, epochs: int) -> tuple[nn.Module, int]:
    """Each window as one batch."""
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x, y = (tensor.cuda() for tensor in data(rows).tensors)
    updates = 0
    for _ in range(epochs):
        for a, b in zip(x.split(batch * accumulate), y.split(batch * accumulate), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(a), b, WEIGHT.cuda()).backward()
            optimizer.step()
            updates += 1
    return model, updates


def counted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    kept = (batch[1] >= 0).sum()
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none", ignore_index=-100)
    return each.sum() / kept.clamp(min=1), kept


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("rows", [192, 203], ids=["even", "tail"])
@pytest.mark.parametrize(
    "settings", [{"graph": 1}, {"graph": 4, "stream": "resident"}, {}], ids=["1", "several", "eager"]
)
def test_captured_windows_weigh_by_what_counts(settings: dict[str, Any], rows: int, accumulate: int) -> None:
    theirs, updates = by_hand(rows, 8, accumulate, 4)
    ours = network()
    plan = Plan("cuda:0", accumulate=accumulate, **settings)
    loss = nn.CrossEntropyLoss(weight=WEIGHT).cuda()
    loop = Loop(ours, torch.optim.SGD(ours.parameters(), 0.05), loss, device="cuda", plan=plan)
    loop.fit(DataLoader(data(rows), 8), epochs=4, progress=False)
    assert loop.plan.graph == settings.get("graph", 0), "captured"
    assert loop.steps == updates
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_captured_window_of_an_objective_that_counts_on_the_device() -> None:
    results = []
    for graph in (0, 1):
        model = network()
        plan = Plan("cuda:0", accumulate=3, graph=graph)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        loop = Loop(model, optimizer, objective=counted, device="cuda", plan=plan)
        for _ in range(4):
            for batch in loop.batches(DataLoader(data(203), 8)):
                loop.step(batch)
        assert loop.plan.graph == graph
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


def test_captured_micro_batches() -> None:
    theirs, updates = by_hand(192, 16, 2, 4)
    ours = network()
    plan = Plan("cuda:0", accumulate=2, micro_batch=5, graph=1)
    loss = nn.CrossEntropyLoss(weight=WEIGHT).cuda()
    loop = Loop(ours, torch.optim.SGD(ours.parameters(), 0.05), loss, device="cuda", plan=plan)
    loop.fit(DataLoader(data(192), 16), epochs=4, progress=False)
    assert loop.plan.graph == 1
    assert loop.steps == updates
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("settings", [{"accumulate": 3}, {"micro_batch": 5}, {"accumulate": 3, "graph": 1}], ids=str)
def test_nothing_waits_for_the_weights(
    settings: dict[str, int], no_waits: Callable[[], AbstractContextManager[None]]
) -> None:
    model = network()
    loss = nn.CrossEntropyLoss(weight=WEIGHT).cuda()
    plan = Plan("cuda:0", **settings)
    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.05), loss, device="cuda", plan=plan)
    batch = tuple(tensor[:16].cuda() for tensor in data(16).tensors)
    for _ in range(70):  # the 64th cut is compared
        loop.step(batch)
    with no_waits():
        for _ in range(12):
            loop.step(batch)


def test_dropout_in_attention_and_in_recurrent_layers_is_off_in_the_comparison() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
            self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.rnn(x)[0]
            h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.5) + self.attention(h, h, h, need_weights=False)[0]
            return self.head(h.mean(1))

    model = Mixed()
    plan = Plan("cuda:0", micro_batch=5)
    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.05), nn.CrossEntropyLoss(), device="cuda", plan=plan)
    loop.step((torch.randn(16, 7, 8), torch.arange(16) % 3))
    assert loop.steps == 1
