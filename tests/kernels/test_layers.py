"""Which kernels are compiled beside the first step of a model: those that its layers will need."""

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from hotloop.kernels.layers import prepare

ALWAYS = {(), ("KIND=0",)}


def parts_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, ...]]:
    """The macros with which kernels are compiled for a model."""
    made = Mock()
    monkeypatch.setattr("hotloop.kernels.layers.kernels_for", made)
    prepare(model, torch.device("cuda"), torch.bfloat16)
    assert made.return_value.compile_beside.call_count == made.call_count
    return {call.args[2:] for call in made.call_args_list}


def block(normalization: nn.Module, *more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), normalization, *more)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (block(nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)), {("KIND=1",), ("KIND=1", "SIDE=2")}),
        (block(nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(3)), {("KIND=2",), ("KIND=2", "SIDE=3")}),
        (block(nn.GroupNorm(2, 8), nn.SiLU()), {("KIND=4",), ("GROUPS",)}),
        (block(nn.BatchNorm2d(8)), {("KIND=1",)}),  # an activation that is no layer is most often a ReLU
    ],
    ids=["pooled", "of three", "groups", "functional"],
)
def test_what_a_model_will_need_is_compiled(
    model: nn.Module, more: set[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parts_of(model, monkeypatch) == ALWAYS | more


def test_a_convolution_may_be_pooled_before_its_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(8), nn.GELU())
    assert {("KIND=0", "SIDE=2"), ("KIND=2", "SIDE=2")} < parts_of(model, monkeypatch)


def test_groups_that_the_kernels_do_not_take_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts_of(block(nn.GroupNorm(3, 9)), monkeypatch) == ALWAYS | {("KIND=1",)}
