"""The fused optimizer is used only where its update is that of the plain one."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import BadArgument, PlanWarning

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Skipping(SGD):
    """Its fused form changes nothing, as PyTorch 2.13's for bf16 on a CPU."""

    def step(self, closure: Any = None) -> Any:
        return None if self.param_groups[0]["fused"] else super().step(closure)


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, 0.05, momentum=0.9)


def skipping(parameters: Any) -> Optimizer:
    return Skipping(parameters, 0.05)


kinds = pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [(momentum, torch.bfloat16), (momentum, torch.float16), (skipping, torch.float32)],
    ids=["SGD in bf16", "SGD in fp16", "one that skips"],
)
Build = Callable[[Any], Optimizer]


def built(optimizer: Build, dtype: torch.dtype, plan: Any, device: str = "cpu") -> tuple[hotloop.Loop, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(32, 4).to(dtype)
    loop = hotloop.Loop(model, optimizer(model.parameters()), nn.MSELoss(), device=device, plan=plan)
    return loop, model


def loader_of(dtype: torch.dtype) -> DataLoader[Any]:
    torch.manual_seed(1)
    x = torch.randn(512, 32)
    return DataLoader(TensorDataset(x.to(dtype), x[:, :4].to(dtype)), 4)


def trained(optimizer: Build, dtype: torch.dtype, plan: Any, device: str = "cpu") -> tuple[hotloop.Loop, Tensor]:
    loop, model = built(optimizer, dtype, plan, device)
    loop.fit(loader_of(dtype), progress=False)
    return loop, next(model.parameters()).detach().float().cpu()


@pytest.mark.parametrize("device", DEVICES)
@kinds
def test_the_default_trains_as_the_plain_loop_does(optimizer: Build, dtype: torch.dtype, device: str) -> None:
    _, plain = trained(optimizer, dtype, "plain", device)
    loop, default = trained(optimizer, dtype, "auto", device)
    assert loop.tuning is not None or device == "cuda"
    assert torch.allclose(default, plain, atol=0.05)


@kinds
def test_a_plan_by_hand_is_refused_or_trains_as_the_plain_loop_does(optimizer: Build, dtype: torch.dtype) -> None:
    _, plain = trained(optimizer, dtype, "plain")
    try:
        _, fused = trained(optimizer, dtype, hotloop.Plan("cpu", fused=True))
    except BadArgument as error:
        said = str(error)
    else:
        assert torch.allclose(fused, plain, atol=0.05)
        return
    assert "the plan has fused" in said
    assert "its update is not that of the plain form" in said


def test_tuning_does_not_try_what_is_wrong() -> None:
    loop, _ = built(skipping, torch.float32, "auto")
    tuning = loop.tune(loader_of(torch.float32), steps=20, progress=False)
    (trial,) = (each for each in tuning.trials if each.lever == "fused")
    assert trial.verdict == "not tried"
    assert "is wrong in this PyTorch" in trial.why


def test_a_person_who_built_it_fused_is_told() -> None:
    def fused(parameters: Any) -> Optimizer:
        return Skipping(parameters, 0.05, fused=True)

    with pytest.warns(PlanWarning, match=r"built with fused=True, but .* is wrong in this PyTorch"):
        built(fused, torch.float32, "plain")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Adam, AdamW, SGD, Adagrad])
def test_what_is_right_is_used(kind: Any, device: str) -> None:
    if kind is Adagrad and device == "cuda":
        pytest.skip("its kernel for CUDA is not in every PyTorch")
    with warnings.catch_warnings(action="error"):
        loop, _ = built(kind, torch.float32, hotloop.Plan(fused=True), device)
        built(lambda p: kind(p, fused=True), torch.float32, "auto", device)
    assert loop.plan.fused
