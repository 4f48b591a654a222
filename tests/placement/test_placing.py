"""`place`: the model moves once, nothing is left behind unseen, the optimizer's state comes along."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from hotloop import HotloopError, place
from hotloop.errors import LeftBehind, LeftBehindWarning


class Forgetful(nn.Module):
    """Holds tensors that PyTorch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.register_buffer("known", torch.zeros(3))
        self.mask = torch.ones(3)
        self.tables = {"low": torch.zeros(2), "high": [torch.ones(1)]}
        self.weights = [nn.Parameter(torch.ones(2))]


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Forgetful()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(4, 3, generator=generator).to(device)).square().mean().backward()
        optimizer.step()


def test_the_model_itself_comes_back_on_the_device() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert place(model, "meta") is model
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"meta"}


def test_plain_attributes_are_named_with_their_path_and_the_line_that_fixes_them() -> None:
    with pytest.warns(LeftBehindWarning) as caught:
        place(Parent(), "meta")
    text = str(caught[0].message)
    assert "model.child.mask: (3,) float32 on cpu" in text
    assert 'self.register_buffer("mask", …, persistent=False) instead of self.mask = …' in text
    assert "model.child.tables['low']" in text
    assert "model.child.tables['high'][0]" in text
    assert "self.weights = nn.ParameterList(weights)" in text
    assert "known" not in text
    assert caught[0].filename == __file__


def test_strict_makes_it_an_error() -> None:
    with pytest.raises(LeftBehind, match="mask"):
        place(Forgetful(), "meta", strict=True)


def test_nothing_is_said_where_nothing_stayed_behind() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        place(Forgetful(), "cpu")
    assert caught == []


def test_attributes_may_be_graphs() -> None:
    nodes: list[dict[str, Any]] = [{"value": torch.zeros(1)} for _ in range(12)]
    for node in nodes:
        node["neighbours"] = nodes  # more ways through it than could be walked
    model = nn.Linear(2, 2)
    model.graph = nodes[0]
    with pytest.warns(LeftBehindWarning) as told:
        place(model, "meta")
    assert str(told[0].message).count("fix: ") == len(nodes), "each tensor once"


def test_what_several_layers_hold_is_told_once() -> None:
    settings = {"scale": torch.zeros(1)}
    layers = [nn.Linear(2, 2) for _ in range(3)]
    for layer in layers:
        layer.settings = settings
    with pytest.warns(LeftBehindWarning) as told:
        place(nn.Sequential(*layers), "meta")
    assert str(told[0].message).count("fix: ") == 1
    assert "model.0.settings['scale']" in str(told[0].message)


def test_a_module_that_refuses_to_move_is_found() -> None:
    class Stubborn(nn.Linear):
        def _apply(self, fn, recurse=True):
            return self

    with pytest.raises(LeftBehind, match=r"0\.weight, 0\.bias"):
        place(nn.Sequential(Stubborn(2, 2)), "meta")


def test_a_model_without_values_cannot_be_placed() -> None:
    with pytest.raises(HotloopError, match="to_empty"):
        place(nn.Linear(2, 2, device="meta"), "cpu")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.LBFGS], ids=lambda k: k.__name__)
def test_parameters_that_become_new_objects_are_followed(kind: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(3, 3)
    before = list(model.parameters())
    optimizer = kind(model.parameters(), lr=0.1)
    place(model, "meta", optimizer)
    after = list(model.parameters())
    assert all(new is not old for new, old in zip(after, before, strict=True)), "the move to meta makes new parameters"
    assert all(new is held for new, held in zip(after, optimizer.param_groups[0]["params"], strict=True))


def test_state_moves_and_the_step_count_stays_on_the_host() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    place(model, "meta", optimizer)
    state = optimizer.state[model.weight]
    assert state["exp_avg"].device.type == "meta"
    assert state["step"].device.type == "cpu"
    assert len(optimizer.state) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_an_optimizer_built_and_used_before_the_move_keeps_working(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, optimizer)
    for group in optimizer.param_groups:
        group.update(options)
    twin = nn.Linear(3, 3)
    twin.load_state_dict(model.state_dict())
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # it would share the step counts
    for group in twin_optimizer.param_groups:
        group.update({"fused": None, "capturable": False})
    place(model, "cuda", optimizer)
    trained(model, optimizer)
    trained(twin, twin_optimizer)
    torch.testing.assert_close(model.weight.cpu(), twin.weight, rtol=1e-4, atol=1e-5)
    assert optimizer.state[model.weight]["exp_avg"].is_cuda


@pytest.mark.gpu
def test_a_left_behind_attribute_on_a_real_gpu() -> None:
    with pytest.warns(LeftBehindWarning, match=r"model\.mask: \(3,\) float32 on cpu"):
        model = place(Forgetful(), "cuda")
    assert model.body.weight.is_cuda
    assert model.known.is_cuda
