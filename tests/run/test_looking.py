"""What a loop tells of its memory, and what it plans by it."""

import copy
import json
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hotloop
from hotloop.errors import BadArgument
from hotloop.run import Loop
from hotloop.values.reach import look

from ..same import same
from .test_dry_run import Counting, Jitter, Lookahead, Remembering

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
    assert now.peak is None
    seen = loop.memory(batch())
    assert [*dict.fromkeys(sample.phase for sample in seen.step)][-3:] == ["forward", "backward", "update"]
    assert seen.peak.total == max(sample.total for sample in seen.step) > weights
    assert seen.peak.parameters == weights
    assert seen.peak.activations >= 6 * 64 * 128 * 4  # each GELU keeps what came in
    assert "activations" in str(seen)
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


class Interrupted:
    """An objective in the middle of which Ctrl-C comes."""

    comes = False

    def __call__(self, model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(model(given[0]), given[1])
        if self.comes:
            raise KeyboardInterrupt
        return loss


@pytest.mark.parametrize("call", ["memory", "largest_batch", "profile", "tune"])
def test_ctrl_c_leaves_no_trace(call: str) -> None:
    """Gradients that wait for their update are there again."""
    objective, model = Interrupted(), nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.1), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    loop = Loop(model, optimizer, objective=objective, plan=hotloop.Plan("cpu", accumulate=2))
    for _ in range(3):
        loop.step(batch())

    def everything() -> list[Any]:
        gradients = [parameter.grad for parameter in model.parameters()]
        return [model.state_dict(), optimizer.state_dict()["state"], gradients, torch.get_rng_state()]

    before = copy.deepcopy(everything())
    objective.comes = True
    with pytest.raises(KeyboardInterrupt):
        getattr(loop, call)(batch() if call == "memory" else [batch()])
    assert same(before, everything())


@pytest.mark.parametrize("call", ["memory", "largest_batch", "profile"])
def test_what_objects_keep_for_themselves_is_put_back(call: str) -> None:
    model, loader = Remembering(8, 2), DataLoader(Counting(*batch()), 16)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), 0.1))
    loop = Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain")
    transform = Jitter()
    roots = {"model": model, "optimizer": optimizer, "dataset": loader.dataset, "transform": transform}
    before = look(roots)
    if call == "memory":
        loop.memory(batch())
    elif call == "largest_batch":
        loop.largest_batch(loader, limit=8, device_transform=transform)
    else:
        loop.profile(loader, steps=3, progress=False, device_transform=transform)
    assert before.changes(look(roots)) == []


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
