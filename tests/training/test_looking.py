"""What a loop tells of its memory, and what it plans by it."""

import json
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hotloop
from hotloop.errors import BadArgument, MemoryWarning, PlanWarning
from hotloop.training import Loop
from hotloop.values.effects import look

pytestmark = pytest.mark.usefixtures("light_heap")


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


class Remembering(nn.Linear):
    """A layer with a list, a dict and generators."""

    def __init__(self) -> None:
        super().__init__(8, 2)
        self.seen: list[int] = []
        self.counts = {"calls": 0}
        self.generators = [torch.Generator().manual_seed(0), np.random.default_rng(0), random.Random(0)]  # noqa: S311

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.counts["calls"] += 1
        torch_rng, numpy_rng, python_rng = self.generators
        return super().forward(x) + torch.rand(1, generator=torch_rng) + numpy_rng.random() + python_rng.random()


class Counting(TensorDataset):
    """A dataset that counts what is read."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return super().__getitem__(index)


class CountingSGD(torch.optim.SGD):
    """An optimizer that counts its steps in an attribute."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class Shaking:
    """A transform with a generator and a count."""

    def __init__(self) -> None:
        self.rng, self.calls = torch.Generator().manual_seed(0), 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        return batch[0] + torch.rand(1, generator=self.rng), batch[1]


@pytest.mark.parametrize("call", ["memory", "largest_batch", "profile"])
def test_what_objects_keep_for_themselves_is_put_back(call: str) -> None:
    model, loader = Remembering(), DataLoader(Counting(*batch()), 16)
    optimizer = CountingSGD(model.parameters(), 0.1)
    loop = Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain")
    transform = Shaking()
    roots = {"model": model, "optimizer": optimizer, "dataset": loader.dataset, "transform": transform}
    before = look(roots)
    if call == "memory":
        loop.memory(batch())
    elif call == "largest_batch":
        loop.largest_batch(loader, limit=8, device_transform=transform)
    else:
        loop.profile(loader, steps=3, progress=False, device_transform=transform)
    assert before.changes(look(roots)) == []


def test_what_cannot_be_put_back_is_named() -> None:
    sizes: list[int] = []

    def objective(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[0]))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    model = nn.Linear(8, 2)
    loop = Loop(model, torch.optim.SGD(model.parameters()), objective=objective, device="cpu", plan="plain")
    with pytest.warns(PlanWarning, match="real steps have changed sizes, which cannot be restored"):
        loop.memory(batch())


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


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Items that take a moment to make."""

    def __init__(self, items: int) -> None:
        self.inputs, self.targets = batch(items)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.005)
        return self.inputs[index], self.targets[index]


def shuffled(dataset: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(dataset, 16, shuffle=True, generator=torch.Generator().manual_seed(5))


def test_a_profile_tells_where_the_time_of_a_step_goes() -> None:
    profile = deep().profile(shuffled(Slow(64)), steps=6, progress=False)
    assert (profile.steps, profile.device) == (6, "cpu")
    assert profile.parts.shares["data"] > 0.3, "sixteen items of 5 ms each"
    assert sum(profile.parts.shares.values()) == pytest.approx(1, abs=0.02)
    lines = {operation.line.file for operation in profile.operations if operation.line is not None}
    assert any(file.endswith("test_looking.py") for file in lines), "the forward of the block above"


def test_a_profile_leaves_no_trace() -> None:
    ends = []
    for looks in (False, True):
        loop, loader = deep(), shuffled(TensorDataset(*batch(64)))
        loop.model.eval()
        torch.manual_seed(2)
        if looks:
            loop.profile(loader, steps=2, progress=False)
            assert not loop.model.training
        report = loop.fit(loader, epochs=2, progress=False)
        ends.append((report.steps, report.curve, [parameter.clone() for parameter in loop.model.parameters()]))
    (steps, curve, weights), (other_steps, other_curve, other_weights) = ends
    assert (steps, curve) == (other_steps, other_curve)
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def test_what_can_be_read_only_once_is_not_profiled_away() -> None:
    with pytest.raises(BadArgument, match="only once"):
        deep().profile(iter([batch()]))
