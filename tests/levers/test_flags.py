"""How an optimizer computes is the plan's affair while it is applied, and the person's everywhere else."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop._torch import COUNTS, step_hooks
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


@pytest.mark.gpu
def test_nadam_has_both_of_its_counts_where_its_update_reads_them() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(3, 1)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.NAdam(model.parameters(), 0.125) for model in models]
    plans = [Plan("cuda:0", graph=1), "plain"]
    for model, optimizer, plan in zip(models, optimizers, plans, strict=True):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()  # on the host, where its counts begin
        loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cuda:0", plan=plan)
        loop.fit(data(), epochs=4, progress=False)
        assert loop.plan.graph == (plan != "plain")
        assert all(kept[name].is_cpu for kept in optimizer.state_dict()["state"].values() for name in COUNTS)
    torch.testing.assert_close(*([*model.parameters()] for model in models), rtol=1e-4, atol=1e-6)


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


def centred(gradient: Tensor) -> Tensor:
    """The gradient of a weight without its mean, in the usual memory format."""
    rows = gradient.flatten(1)
    return (rows - rows.mean(1, keepdim=True)).reshape(gradient.shape).contiguous()


def centre_when_accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def hook(weight: Tensor) -> None:
        weight.grad = centred(weight.grad)

    for layer in (model[0], model[-1]):
        layer.weight.register_post_accumulate_grad_hook(hook)


def centre_before_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def hook(*_: Any) -> None:
        for layer in (model[0], model[-1]):
            layer.weight.grad = centred(layer.weight.grad)

    optimizer.register_step_pre_hook(hook)


def replace_weights_and_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def hook(*_: Any) -> None:
        weight = model[0].weight
        weight.data = (0.99 * weight.data).contiguous()
        optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].contiguous()

    optimizer.register_step_post_hook(hook)


def pictures() -> tuple[DataLoader[Any], list[nn.Module]]:
    """Batches, and two models that are alike."""
    dice = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 3, 8, 8, generator=dice), torch.randint(4, (24,), generator=dice)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return DataLoader(TensorDataset(x, y), 8), [model, copy.deepcopy(model)]


@pytest.mark.parametrize("change", [centre_when_accumulated, centre_before_steps, replace_weights_and_state])
def test_what_hooks_put_into_another_memory_format_is_trained_with_as_by_hand(
    change: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> None:
    batches, models = pictures()
    optimizers = [torch.optim.Adam(model.parameters(), 0.01, eps=1e-3) for model in models]
    plan = Plan("cpu", fused=True, channels_last=True)
    loop = hotloop.Loop(models[0], optimizers[0], nn.CrossEntropyLoss(), plan=plan)
    for model, optimizer in zip(models, optimizers, strict=True):
        change(model, optimizer)
    loop.fit(batches, epochs=3, progress=False)
    for x, y in [batch for _ in range(3) for batch in batches]:
        optimizers[1].zero_grad()
        nn.functional.cross_entropy(models[1](x), y).backward()
        optimizers[1].step()
    torch.testing.assert_close(*([*model.parameters()] for model in models), rtol=0, atol=1e-5)
    hooks = [step_hooks(optimizer) for optimizer in optimizers]
    assert len(hooks[0]) == len(hooks[1]), "one is left behind"


@pytest.mark.parametrize("more", [{}, {"nesterov": True}, {"dampening": 0.3}, {"dampening": 0.3, "maximize": True}])
def test_layers_that_are_unfrozen_later_are_trained_as_by_hand(more: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    models = [model, copy.deepcopy(model)]
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01, **more}
    optimizers = [torch.optim.SGD(model.parameters(), 0.01, **options) for model in models]
    for model in models:
        model[0].requires_grad_(False)
    loop = hotloop.Loop(models[0], optimizers[0], nn.MSELoss(), plan=Plan("cpu", fused=True))
    loop.fit(data(), epochs=3, progress=False, on_epoch=lambda record: record.model.requires_grad_(True) and None)
    for _ in range(3):
        for x, y in data():
            optimizers[1].zero_grad()
            nn.functional.mse_loss(models[1](x), y).backward()
            optimizers[1].step()
        models[1].requires_grad_(True)
    torch.testing.assert_close(*([*model.parameters()] for model in models), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_steps_by_hand_in_a_hook_are_those_of_a_loop_by_hand(name: str) -> None:
    batches, models = pictures()
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {"eps": 1e-3}
    optimizers = [getattr(torch.optim, name)(model.parameters(), 0.01, **options) for model in models]

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for weight in model.parameters():
                weight.grad = None if weight.grad is None else weight.grad.contiguous()
            optimizer.step()

    def warm_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.requires_grad_(True)
        steps(model, optimizer)

    for model in models:
        model[-1].requires_grad_(False)
    plan = Plan("cpu", fused=True, channels_last=True)
    loop = hotloop.Loop(models[0], optimizers[0], nn.CrossEntropyLoss(), plan=plan)
    loop.fit(batches, epochs=2, progress=False, on_epoch=lambda record: warm_up(models[0], optimizers[0]))
    for _ in range(2):
        steps(models[1], optimizers[1])
        warm_up(models[1], optimizers[1])
    torch.testing.assert_close(*([*model.parameters()] for model in models), rtol=0, atol=1e-5)
    assert step_hooks(optimizers[0]) == []


class Words(nn.Module):
    """A table whose gradient is sparse, which no layer shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(9, 4))
        self.linear = nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.linear(nn.functional.embedding(words, self.table, sparse=True).mean(1))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
@pytest.mark.parametrize(
    ("device", "plan"),
    [
        ("cpu", Plan("cpu", fused=True)),
        pytest.param("cuda:0", "auto", marks=pytest.mark.gpu),
    ],
)
def test_a_sparse_gradient_that_nobody_foresaw_is_updated_without_a_fused_kernel(
    optimizer: str, device: str, plan: Any
) -> None:
    words, targets = torch.randint(9, (4, 8, 3)), torch.randn(4, 8, 2)
    models = [Words(), Words().to(device)]
    optimizers = [
        getattr(torch.optim, optimizer)([{"params": [m.table]}, {"params": m.linear.parameters()}], 0.1) for m in models
    ]
    loop = hotloop.Loop(models[0], optimizers[0], nn.MSELoss(), device=device, plan=plan)
    for batch in zip(words, targets, strict=True):
        loop.step(batch)
        optimizers[1].zero_grad()
        nn.functional.mse_loss(models[1](batch[0].to(device)), batch[1].to(device)).backward()
        optimizers[1].step()
    torch.testing.assert_close(*([*model.parameters()] for model in models), rtol=0, atol=1e-6)
    if device == "cpu" or optimizer == "SGD":  # Adagrad has its kernel for CUDA in newer versions of PyTorch
        assert [group["fused"] for group in optimizers[0].param_groups] == [None, True], "the other keeps its kernel"
    loop.fit(list(zip(words, targets, strict=True)), progress=False)


def test_the_error_of_an_optimizer_that_a_person_fused_is_theirs() -> None:
    model = Words()
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), nn.MSELoss(), device="cpu")
    with pytest.raises(RuntimeError, match="sparse"):
        loop.step((torch.randint(9, (8, 3)), torch.randn(8, 2)))
