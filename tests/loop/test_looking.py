"""What a loop tells of its memory, and what it plans by it."""

import json

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import MemoryWarning
from hotloop.loop import Loop


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def deep(plan: hotloop.Plan | str = "plain") -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Sequential(*(Block(32) for _ in range(6))), nn.Linear(32, 2))
    return Loop(model, torch.optim.AdamW(model.parameters(), 1e-2), nn.CrossEntropyLoss(), device="cpu", plan=plan)


def batch(items: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(items, 8, generator=generator), torch.randint(2, (items,), generator=generator)


def test_what_is_held_and_what_a_step_takes() -> None:
    loop = deep()
    now = loop.memory()
    weights = sum(p.numel() * 4 for p in loop.model.parameters())
    assert now.holdings.on("cpu").parameters == weights
    assert now.holdings.on("cpu").optimizer == 0
    assert now.step is None
    seen = loop.memory(batch()).step
    assert seen is not None
    assert list(seen.phases) == ["between", "forward", "backward", "optimizer"]
    assert seen.peak == max(seen.phases.values()) > weights
    kept = {module.name: module.saved for module in seen.modules}
    assert kept["1.0.inner.1"] == 64 * 128 * 4  # GELU keeps what came in
    json.dumps(seen.to_json())


def test_looking_leaves_no_trace() -> None:
    looked, other = deep(), deep()
    for loop in (looked, other):
        torch.manual_seed(2)  # for the dropout
        loop.step(batch())
        if loop is looked:
            loop.memory(batch())
        loop.step(batch())
    for mine, theirs in zip(looked.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_largest_batch_of_a_dataset_is_the_dataset() -> None:
    loop = deep()
    before = [p.clone() for p in loop.model.parameters()]
    found = loop.largest_batch(DataLoader(TensorDataset(*batch(96)), 8), seconds=60)
    assert found.items == 96
    assert found.reason == "data"
    assert 1 <= found.best <= 96
    assert all(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))


def test_a_budget_is_kept_and_the_numbers_stay() -> None:
    plain = deep()
    need = plain.memory(batch(512)).step
    assert need is not None
    tight = deep(hotloop.Plan("cpu", memory_budget=int(0.8 * need.peak)))
    losses = []
    for loop in (plain, tight):
        torch.manual_seed(2)  # for the dropout
        losses.append([loop.step(batch(512)).item() for _ in range(3)])
    assert losses[0] == losses[1]
    assert tight.plan.recompute
    assert tight.budgeting is not None
    assert tight.budgeting.peak_after is not None
    assert tight.budgeting.peak_before is not None
    assert tight.budgeting.peak_after <= 0.8 * need.peak < tight.budgeting.peak_before


def test_a_budget_that_cannot_be_kept_is_told() -> None:
    loop = deep(hotloop.Plan("cpu", memory_budget="200kB"))
    with pytest.warns(MemoryWarning, match="missing"):
        loop.step(batch(512))
    assert loop.steps == 1


def test_nonsense_is_refused_at_once() -> None:
    with pytest.raises(hotloop.HotloopError, match="lots"):
        deep(hotloop.Plan("cpu", memory_budget="lots"))
