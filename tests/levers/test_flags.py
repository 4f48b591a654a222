"""How an optimizer computes is the plan's affair while it is applied, and the person's everywhere else."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.levers.applied import AppliedPlan
from hotloop.levers.flags import FLAGS
from hotloop.plan import Plan

OWN = {"fused": None, "foreach": None, "capturable": False}


def data() -> DataLoader[Any]:
    x = torch.linspace(-1, 1, 96).view(32, 3)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)


def flags_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in FLAGS}


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], 0.1)


@pytest.mark.parametrize(
    ("plan", "device"),
    [
        (Plan("cpu", fused=True), "cpu"),
        pytest.param(Plan("cuda:0", fused=True), "cuda:0", marks=pytest.mark.gpu),
        pytest.param(Plan("cuda:0", graph=1), "cuda:0", marks=pytest.mark.gpu),
    ],
)
def test_a_state_that_a_person_saves_is_theirs_and_one_that_they_load_leaves_the_plan(plan: Plan, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = adam(model)
    saved: list[dict[str, Any]] = []

    def save_and_load(record: Any) -> None:
        saved.append(optimizer.state_dict())
        optimizer.load_state_dict(copy.deepcopy(saved[-1]))
        assert [flags_of(group) for group in optimizer.param_groups] == planned

    loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device=device, plan=plan)
    planned = [flags_of(group) for group in optimizer.param_groups]
    assert all(group != OWN for group in planned)
    losses = [epoch.loss for epoch in loop.fit(data(), epochs=4, on_epoch=save_and_load, progress=False).epochs]
    assert loop.plan == plan
    saved.append(optimizer.state_dict())
    for state in saved:
        assert [flags_of(group) for group in state["param_groups"]] == [OWN, OWN]
        assert all(kept["step"].is_cpu for kept in state["state"].values())

    torch.manual_seed(0)
    alone = nn.Linear(3, 1)
    plain = hotloop.Loop(alone, adam(alone), nn.MSELoss(), device=device, plan="plain")
    assert [epoch.loss for epoch in plain.fit(data(), epochs=4, progress=False).epochs] == pytest.approx(
        losses, rel=1e-4
    )

    elsewhere = nn.Linear(3, 1)  # without hotloop, and without a GPU
    other = adam(elsewhere)
    other.load_state_dict(saved[-1])
    elsewhere(torch.ones(1, 3)).sum().backward()
    other.step()
    assert float(other.state[elsewhere.weight]["step"]) == 17


def test_groups_that_come_later_are_reverted_too() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam([model.weight], 0.1)
    applied = AppliedPlan(Plan("cpu", fused=True), model, [optimizer])
    applied.apply()
    optimizer.load_state_dict(optimizer.state_dict())  # which replaces the groups
    optimizer.add_param_group({"params": [model.bias]})
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    assert [group["fused"] for group in optimizer.state_dict()["param_groups"]] == [None, None]
    applied.revert()
    assert [flags_of(group) for group in optimizer.param_groups] == [OWN, OWN]
    optimizer.param_groups[0]["fused"] = True
    assert optimizer.state_dict()["param_groups"][0]["fused"] is True, "nobody is in between any more"
