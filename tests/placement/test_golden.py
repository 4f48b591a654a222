"""`golden_rule`: mixed devices are explained by tensor, by line and by the line to write instead."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotloop import DeviceMismatch, golden_rule, place, to_numpy
from hotloop.errors import BadArgument, LeftBehindWarning

OTHER = ["meta", pytest.param("cuda", marks=pytest.mark.gpu)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.scale = torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


def line_of(mark: str) -> int:
    """The number of the line of this file that ends in the comment `# mark`."""
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if line.endswith(f"# {mark}"))


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(DeviceMismatch) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("other", OTHER)
def test_a_batch_that_was_not_moved(other: str) -> None:
    with golden_rule():
        images = torch.zeros(5, 3)  # images-made
        net = Net()
        net.body.to(other)  # net-moved
        text = message_of(lambda: net(images))
    device = "cuda:0" if other == "cuda" else other
    assert "torch.nn.functional.linear" in text
    assert "input (variable x): (5, 3) float32 on cpu" in text
    assert f"made at {Path(__file__).relative_to(Path.cwd())}:{line_of('images-made')}: images = torch.zeros" in text
    assert f"weight (parameter body.0.weight): (4, 3) float32 on {device}" in text
    assert "return self.body(x) * self.scale" in text
    assert f'fix: images = images.to("{device}")' in text
    if other == "cuda":  # parameters of a real device are moved in place, so their line is known
        assert f"moved at {Path(__file__).relative_to(Path.cwd())}:{line_of('net-moved')}" in text


@pytest.mark.parametrize("other", OTHER)
def test_a_plain_attribute_that_stayed_behind(other: str) -> None:
    with golden_rule():
        net = Net()
        with pytest.warns(LeftBehindWarning):
            place(net, other)
        images = torch.zeros(5, 3, device=other)
        text = message_of(lambda: net(images))
    assert "torch.Tensor.mul" in text
    assert "other (attribute scale): (2,) float32 on cpu" in text
    assert 'fix: self.register_buffer("scale", torch.ones(2))  # at ' in text


@pytest.mark.parametrize("other", OTHER)
def test_a_model_that_was_not_moved(other: str) -> None:
    net = Net()
    images = torch.zeros(5, 3, device=other)
    with golden_rule():
        text = message_of(lambda: net(images))
    assert "# moves body.0.weight, body.0.bias" in text
    assert "the line that made it was not seen" in text


OPERATIONS = {
    "add": lambda a, b: a + b,
    "matmul": lambda a, b: a @ b.T,
    "cat": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(a > 0, b, a),
    "loss": F.mse_loss,
    "cross_entropy": lambda a, b: F.cross_entropy(a, b[:, 0].long()),
    "embedding": lambda a, b: F.embedding(a.long(), b),
    "conv": lambda a, b: F.conv1d(a[None], b[:, :, None].expand(4, 4, 4)),
    "inplace": lambda a, b: a.add_(b),
    "keyword": lambda a, b: torch.add(input=a, other=b),
    "stack": lambda a, b: torch.stack((a, b)),
}


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_kind_of_operation(operation: Callable[..., object], other: str) -> None:
    with golden_rule():
        a, b = torch.zeros(4, 4), torch.zeros(4, 4, device=other)
        text = message_of(lambda: operation(a, b))
    assert "one operation needs one device" in text
    assert "on cpu" in text
    assert re.search(r"fix: .*\.to\(|fix: device=", text)


@pytest.mark.parametrize("other", OTHER)
def test_what_pytorch_allows_is_allowed(other: str) -> None:
    with golden_rule():
        far, near = torch.zeros(3, 3, device=other), torch.ones(3, 3)
        assert (far * torch.tensor(2.0)).device.type == other
        assert far[torch.tensor([0, 1])].shape == (2, 3)
        assert near.to(far.device).device.type == other
        far.copy_(near)
        near.to(other).add_(1)
        nn.Linear(2, 2).to(other)


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("convert", [lambda t: t.numpy(), np.asarray], ids=["numpy", "asarray"])
def test_numpy_of_a_tensor_that_is_not_on_the_host(convert: Callable[..., object], other: str) -> None:
    with golden_rule():
        picture = torch.zeros(2, device=other)  # picture-made
        text = message_of(lambda: convert(picture))
    assert "NumPy reads host memory only" in text
    assert f":{line_of('picture-made')}: picture = torch.zeros" in text
    assert re.search(r"fix: hotloop\.to_numpy\((t|picture)\)", text)  # as it is called where the operation stands


def test_numpy_of_host_tensors_works() -> None:
    with golden_rule():
        assert to_numpy(torch.ones(2)).tolist() == [1, 1]
        with pytest.raises(RuntimeError, match="requires grad"):  # not about devices: left as it is
            torch.ones(2, requires_grad=True).numpy()


def test_other_errors_stay_what_they_are() -> None:
    with golden_rule(), pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert not isinstance(caught.value, DeviceMismatch)


@pytest.mark.parametrize("other", OTHER)
def test_what_crosses_devices_on_purpose_fails_for_its_own_reason(other: str) -> None:
    far = torch.zeros(3, 3, device=other)
    with golden_rule():
        with pytest.raises(RuntimeError) as caught:
            far.copy_(torch.ones(2, 2))
        assert not isinstance(caught.value, DeviceMismatch)
        with pytest.raises(RuntimeError) as caught:
            torch.lerp(far, far[:2], torch.tensor(0.5))  # a number from the host is fine, the shapes are not
        assert not isinstance(caught.value, DeviceMismatch)


@pytest.mark.gpu
def test_a_host_tensor_cannot_be_indexed_from_the_gpu() -> None:
    with golden_rule():
        table, index = torch.zeros(3, 3), torch.tensor([0, 1], device="cuda")
        text = message_of(lambda: table[index])
    assert "on cuda:0" in text


def test_as_a_decorator() -> None:
    @golden_rule()
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2)

    assert step(torch.ones(2)).tolist() == [2, 2]
    assert "where other is made" in message_of(lambda: step(torch.ones(2, device="meta")))
    assert step(torch.zeros(2)).tolist() == [1, 1], "it can be called again after a failure"


def test_a_decorator_without_brackets_is_explained() -> None:
    with pytest.raises(BadArgument, match="brackets"):
        golden_rule(lambda: None)


def test_nothing_remains_when_it_ends() -> None:
    from torch.overrides import _get_current_function_mode_stack

    with golden_rule():
        inside = len(_get_current_function_mode_stack())
    assert (inside, len(_get_current_function_mode_stack())) == (1, 0)


def test_a_tensor_whose_data_was_replaced_is_said_to_have_moved() -> None:
    weight = torch.ones(3)
    with golden_rule():
        weight.data = torch.zeros(3)  # data-set
        text = message_of(lambda: weight + torch.ones(3, device="meta"))
    assert re.search(rf"moved at \S+:{line_of('data-set')}", text)


def test_variable_names_come_from_where_the_loop_is_written() -> None:
    def inner(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w

    with golden_rule():
        batch, weight = torch.ones(2), torch.ones(2, device="meta")
        text = message_of(lambda: inner(batch, weight))
    assert "(variable x)" in text
    assert 'fix: batch = batch.to("meta")' in text
    assert f":{inspect.getsourcelines(inner)[1] + 1}: return x * w" in text


@pytest.mark.gpu
def test_optimizer_state_on_the_wrong_device_is_explained() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    model.cuda()  # the optimizer's averages stay on the host
    with golden_rule():
        model(torch.ones(1, 3, device="cuda")).sum().backward()
        text = message_of(optimizer.step)
    assert "hotloop.place(model" in text


def test_a_module_whose_parameters_are_swapped_moves_inside_of_it() -> None:
    """As on a simulated GPU: PyTorch swaps no tensor to which somebody holds a weak reference."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with golden_rule():
            model = nn.Linear(3, 3)
            model.to("meta")
            with pytest.raises(DeviceMismatch, match=r"moved at .*test_golden"):
                model(torch.ones(2, 3))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # of PyTorch, which calls them a prototype
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    with golden_rule():
        nested = torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 4)], layout=layout)
        assert nn.Linear(4, 3)(nested + nested).is_nested, "jagged ones have a meta tensor with them"
        with pytest.raises(DeviceMismatch, match=r"nested\): \(2.*float32 on cpu"):
            nn.Linear(4, 3, device="meta")(nested)
