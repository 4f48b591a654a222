"""Convolutions with flipped gradients learn what others learn."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hotloop
from hotloop.levers import can_be_flipped
from hotloop.levers.applied import AppliedPlan
from hotloop.levers.flipped import flipped


def gradients(layer: nn.Conv2d, batch: Tensor, forward: object) -> list[Tensor]:
    batch = batch.clone(memory_format=torch.preserve_format).requires_grad_()
    layer.zero_grad()
    output = forward(batch)  # type: ignore[operator]
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    assert batch.grad is not None
    return [output.detach(), batch.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


@settings(deadline=None, max_examples=60)
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    pads=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    size=st.tuples(st.integers(4, 7), st.integers(4, 7)),
    bias=st.booleans(),
    together=st.booleans(),
)
def test_gradients_are_those_of_pytorch(
    kernel: tuple[int, int],
    pads: tuple[int, int],
    channels: tuple[int, int],
    size: tuple[int, int],
    bias: bool,
    together: bool,
) -> None:
    form = torch.channels_last if together else torch.contiguous_format
    layer = nn.Conv2d(*channels, kernel, padding=pads, bias=bias).double().to(memory_format=form)
    batch = torch.randn(2, channels[0], *size, dtype=torch.float64).contiguous(memory_format=form)
    expected = gradients(layer, batch, layer)
    found = gradients(layer, batch, partial(flipped, layer))
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("at_once", [1, 2**20])
def test_gradients_have_gradients(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As penalties on a gradient need, which some trainings compute once in many steps."""
    monkeypatch.setattr("hotloop.levers.flipped.AT_ONCE", at_once)
    layer = nn.Conv2d(2, 3, 3, padding=1).double()
    batch = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(partial(flipped, layer), batch)

    def second(forward: object) -> list[Tensor]:
        first = torch.autograd.grad(forward(batch).pow(3).sum(), layer.parameters(), create_graph=True)  # type: ignore[operator]
        return list(torch.autograd.grad(sum(each.square().sum() for each in first), [batch, *layer.parameters()]))

    torch.testing.assert_close(second(partial(flipped, layer)), second(layer))


def test_transforms_of_functions_work() -> None:
    layer, batch = nn.Conv2d(2, 3, 3), torch.randn(4, 1, 2, 5, 5)

    def of_each(forward: object) -> Tensor:
        gradient = torch.func.grad(lambda image: forward(image).square().sum())  # type: ignore[operator]
        return torch.func.vmap(gradient)(batch)

    torch.testing.assert_close(of_each(partial(flipped, layer)), of_each(layer))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 2, 3, stride=2),
        nn.Conv2d(2, 2, 3, dilation=2),
        nn.Conv2d(2, 2, 3, groups=2),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(2, 2, 2, padding=2),
        nn.ConvTranspose2d(2, 2, 3),
        nn.Conv1d(2, 2, 3),
        nn.Linear(2, 2),
    ],
    ids=repr,
)
def test_other_layers_are_left_alone(layer: nn.Module) -> None:
    assert not can_be_flipped(layer)


def test_a_frozen_layer_gets_no_gradient() -> None:
    layer = nn.Conv2d(2, 3, 3).requires_grad_(False)
    batch = torch.randn(1, 2, 5, 5, requires_grad=True)
    flipped(layer, batch).sum().backward()
    assert layer.weight.grad is None
    assert batch.grad is not None


def test_a_plan_trains_with_it_and_leaves_the_layers_as_they_were() -> None:
    def losses(plan: hotloop.Plan) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(18, 2)
        )
        loop = hotloop.Loop(
            model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), plan=plan, device="cpu"
        )
        data = [(torch.randn(8, 1, 5, 5), torch.randint(2, (8,))) for _ in range(6)]
        assert ("forward" in vars(model[0])) == plan.flipped
        return [loop.step(batch).item() for batch in loop.batches(data)]

    plan = hotloop.Plan("cpu", flipped=True)
    assert losses(plan) == pytest.approx(losses(hotloop.Plan("cpu")), rel=1e-4)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
    applied = AppliedPlan(plan, model, [])
    applied.apply()
    applied.revert()
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_plan_with_it_is_refused_where_nothing_can_be_flipped() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(hotloop.HotloopError, match="no two-dimensional convolution of stride 1"):
        hotloop.Loop(
            model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), plan=hotloop.Plan("cpu", flipped=True)
        )


@pytest.mark.parametrize("at_once", [1, 3000, 2**20])
def test_images_are_laid_out_in_parts_that_add_up(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.levers.flipped.AT_ONCE", at_once)
    layer = nn.Conv2d(3, 5, 3, padding=1).double()
    batch = torch.randn(7, 3, 6, 5, dtype=torch.float64)
    for mine, theirs in zip(
        gradients(layer, batch, partial(flipped, layer)), gradients(layer, batch, layer), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
