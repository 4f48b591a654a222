"""`AppliedPlan`: what a plan changes is undone to the last flag, and what it trains is the same training."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.levers import Lever, acting_levers
from hotloop.levers.applied import AppliedPlan
from hotloop.levers.base import Undo, set_attribute
from hotloop.plan import Plan

Build = Callable[[nn.Module], Optimizer]
OPTIMIZERS: dict[str, Build] = {
    "adam": lambda m: torch.optim.Adam(m.parameters(), 0.01),
    "adam, as asked": lambda m: torch.optim.Adam(m.parameters(), 0.01, foreach=True, amsgrad=True),
    "adam, fused already": lambda m: torch.optim.Adam(m.parameters(), 0.01, fused=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.01, weight_decay=0.1),
    "adamw, in groups": lambda m: torch.optim.AdamW(
        [{"params": [p], "foreach": i % 2 == 0} for i, p in enumerate(m.parameters())], 0.01
    ),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1),
    "sgd with momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True),
    "rmsprop, which cannot be fused": lambda m: torch.optim.RMSprop(m.parameters(), 0.01),
}
every_optimizer = pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def settings_of(optimizer: Optimizer) -> Any:
    """Every flag of an optimizer, and the attributes that it has."""
    own = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return groups, {key: value for key, value in own.items() if isinstance(value, bool | int | str | type(None))}


@every_optimizer
@pytest.mark.parametrize("plan", [Plan("cpu", fused=True), Plan("cpu", graph=1), Plan("cpu", graph=1, fused=True)])
@pytest.mark.parametrize("steps", [0, 2])
def test_revert_undoes_what_apply_did(build: Build, plan: Plan, steps: int) -> None:
    model = network()
    optimizer = build(model)
    train(model, optimizer, steps)
    before, counts = settings_of(optimizer), [state.get("step") for state in optimizer.state.values()]
    applied = AppliedPlan(plan, model, [optimizer])
    for _ in range(2):  # a contestant goes on stage again and again
        applied.apply()
        applied.revert()
        assert settings_of(optimizer) == before
    for count, state in zip(counts, optimizer.state.values(), strict=True):
        if isinstance(count, Tensor):
            assert (state["step"].device, state["step"].dtype) == (count.device, count.dtype)
            assert torch.equal(state["step"], count)


def test_what_is_set_after_the_revert_is_left_alone() -> None:
    model = network()
    optimizer = OPTIMIZERS["adam"](model)
    applied = AppliedPlan(Plan("cpu", fused=True), model, [optimizer])
    applied.apply()
    applied.revert()
    optimizer.param_groups[0]["foreach"] = True
    applied.revert()
    assert optimizer.param_groups[0]["foreach"]


def test_what_was_applied_before_an_error_is_reverted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Lever):
        def apply(self, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Iterator[Undo]:
            yield set_attribute(model, "mark", True)
            raise ZeroDivisionError

    levers = [*acting_levers(Plan("cpu", fused=True)), Failing()]
    monkeypatch.setattr("hotloop.levers.applied.acting_levers", lambda plan: levers)
    model = network()
    optimizer = OPTIMIZERS["adam"](model)
    before = settings_of(optimizer)
    applied = AppliedPlan(Plan("cpu", fused=True), model, [optimizer])
    with pytest.raises(ZeroDivisionError):
        applied.apply()
    assert vars(model)["mark"]
    assert settings_of(optimizer) != before
    applied.revert()
    assert "mark" not in vars(model)
    assert settings_of(optimizer) == before


FUSED = {"fused": True, "foreach": False}


@pytest.mark.parametrize(
    ("name", "plan", "flags"),
    [
        *((name, Plan("cpu", fused=True), FUSED | {"capturable": False}) for name in ("adam", "adamw")),
        ("sgd", Plan("cpu", fused=True), FUSED),
        *((name, Plan("cpu", graph=1), {"capturable": True}) for name in ("adam", "adamw")),
        ("sgd", Plan("cpu", graph=1), {"fused": True}),  # a capture needs rates on the device
    ],
)
def test_flags_are_set_in_between(name: str, plan: Plan, flags: dict[str, bool]) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model)
    AppliedPlan(plan, model, [optimizer]).apply()
    for group in optimizer.param_groups:
        assert {flag: bool(group[flag]) for flag in flags} == flags


@every_optimizer
def test_fused_is_nearly_the_same_training(build: Build) -> None:
    """Also where it begins in the middle of a run and ends before its end."""
    plain, fused = network(), network()
    optimizers = build(plain), build(fused)
    expected = train(plain, optimizers[0], 9)
    losses = train(fused, optimizers[1], 3)
    applied = AppliedPlan(Plan("cpu", fused=True), fused, [optimizers[1]])
    applied.apply()
    losses += train(fused, optimizers[1], 3)
    applied.revert()
    losses += train(fused, optimizers[1], 3)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close([*plain.parameters()], [*fused.parameters()], rtol=1e-3, atol=1e-5)


def test_fused_reads_a_state_that_was_loaded_in_another_memory_format() -> None:
    plain, fused = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
    optimizers = [torch.optim.Adam(each.parameters()) for each in (plain, fused)]
    image = torch.randn(2, 3, 8, 8)
    plain(image).square().sum().backward()
    optimizers[0].step()
    fused.load_state_dict(plain.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    state = optimizers[1].state[fused.weight]
    state |= {name: state[name].contiguous() for name in ("exp_avg", "exp_avg_sq")}
    AppliedPlan(Plan("cpu", fused=True), fused, optimizers[1:]).apply()
    for model, optimizer in zip((plain, fused), optimizers, strict=True):
        model.zero_grad()
        model(image).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(fused.weight, plain.weight)


def test_the_count_of_steps_keeps_its_type() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Linear(4, 3)
        optimizer = OPTIMIZERS["adam"](model)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    applied = AppliedPlan(Plan("cpu"), model, [optimizer])
    applied.apply()
    applied.revert()
    assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float64}


class Block(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = norm or nn.Identity()
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return x + scale * nn.functional.dropout(self.norm(self.linear(x)).tanh(), 0.2)


class Deep(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module | None] = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(norm()) for _ in range(3)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(2)  # the same dropout
    model.zero_grad()
    model(torch.ones(5, 4)).square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_checkpointing_gives_equal_gradients_and_is_undone() -> None:
    model = Deep()
    expected = gradients(model)
    assert [block.calls for block in model.blocks] == [1, 1, 1]
    applied = AppliedPlan(Plan("cpu", checkpointing=True), model, [])
    applied.apply()
    assert all(map(torch.equal, gradients(model), expected))
    assert [block.calls for block in model.blocks] == [3, 3, 3], "each block was computed twice"
    applied.revert()
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(map(torch.equal, gradients(model), expected))
    assert [block.calls for block in model.blocks] == [4, 4, 4]


def test_checkpointing_keeps_less() -> None:
    def kept(plan: Plan) -> int:
        model = Deep()
        applied = AppliedPlan(plan, model, [])
        applied.apply()
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            model(torch.ones(64, 4))
        return sum(sizes)

    assert kept(Plan("cpu", checkpointing=True)) < kept(Plan("cpu"))


def test_checkpointing_changes_no_buffer() -> None:
    def statistics(plan: Plan) -> dict[str, Tensor]:
        model = Deep(lambda: nn.BatchNorm1d(4))
        applied = AppliedPlan(plan, model, [])
        applied.apply()
        gradients(model)
        applied.revert()
        return dict(model.named_buffers())

    plain, checkpointed = statistics(Plan("cpu")), statistics(Plan("cpu", checkpointing=True))
    for name, value in plain.items():
        torch.testing.assert_close(checkpointed[name], value)


SWITCHES: dict[str, Callable[[], Any]] = {
    "tf32": lambda: torch.get_float32_matmul_precision() == "high",
    "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
}


@pytest.mark.parametrize("names", [["tf32"], ["cudnn_benchmark"], ["tf32", "cudnn_benchmark"]], ids=" and ".join)
def test_switches_are_set_inside_and_restored_after_an_error(names: list[str]) -> None:
    applied = AppliedPlan(Plan("cpu", **dict.fromkeys(names, True)), network(), [])
    before = {name: on() for name, on in SWITCHES.items()}
    assert not any(before.values())
    for _ in range(2):
        with suppress(ZeroDivisionError), applied.around():
            assert {name: on() for name, on in SWITCHES.items()} == {name: name in names for name in SWITCHES}
            raise ZeroDivisionError
        assert {name: on() for name, on in SWITCHES.items()} == before


@pytest.mark.parametrize("also", [{}, {"tf32": True}])
@pytest.mark.parametrize("allowed", [True, False])
def test_algorithms_in_half_precision_are_searched_for_anew(
    allowed: bool, also: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a switch that PyTorch tells them apart by; it never allows TF32 to what is in fp32."""
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "allow_tf32", allowed)
    applied = AppliedPlan(Plan("cpu", cudnn_benchmark=True, precision="bf16", **also), network(), [])
    with suppress(ZeroDivisionError), applied.around():
        assert (cudnn.benchmark, cudnn.allow_tf32) == (True, False)
        raise ZeroDivisionError
    assert (cudnn.benchmark, cudnn.allow_tf32) == (False, allowed)
    with AppliedPlan(Plan("cpu", cudnn_benchmark=True), network(), []).around():
        assert (cudnn.benchmark, cudnn.allow_tf32) == (True, allowed)  # in fp32 it would change the numbers


def test_a_switch_that_was_on_stays_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with AppliedPlan(Plan("cpu", cudnn_benchmark=True), network(), []).around():
        pass
    assert torch.backends.cudnn.benchmark


def test_the_settings_of_each_library_come_back_too() -> None:
    places = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "none"  # as PyTorch has it at first: what is set for all applies
    try:
        with AppliedPlan(Plan("cpu", tf32=True), network(), []).around():
            pass
        assert [place.fp32_precision for place in places] == ["none", "none"]
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def test_a_batch_in_channels_last() -> None:
    images = torch.rand(2, 3, 4, 5)
    masks = torch.ones(2, 3, 4, 5, dtype=torch.long)
    batch = {"images": images, "rest": (masks, torch.ones(2, 3), "name")}
    laid = AppliedPlan(Plan("cpu", channels_last=True), network(), []).inputs(batch)
    assert laid["images"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(laid["images"], images)
    assert laid["rest"] == batch["rest"]
    assert images.is_contiguous(), "the batch that was handed in is as it was"
    assert AppliedPlan(Plan("cpu"), network(), []).inputs(batch) is batch
