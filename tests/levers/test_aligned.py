"""Layers with zeros beyond their end compute what they compute without."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from hotloop.levers import aligned
from hotloop.levers.aligned import AlignedLever, Recurrence, convolution, linear, odd_layers
from hotloop.plan import Plan

CLOSE = {"rtol": 2e-2, "atol": 2e-2}  # of numbers around 1 in bf16


def in_bf16(call: Any, *given: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return call(*given)


@given(shape=st.lists(st.integers(1, 5), min_size=0, max_size=3), inputs=st.integers(1, 20), outputs=st.integers(1, 20))
def test_a_linear_layer(shape: list[int], inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=outputs % 2 == 0)
    x = torch.randn(*shape, inputs, requires_grad=True)
    expected, found = in_bf16(layer, x), in_bf16(linear, layer, x)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(found, expected, **CLOSE)
    parameters = [x, *layer.parameters()]
    gradients = [torch.autograd.grad(out.float().square().sum(), parameters) for out in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.3)
    assert torch.equal(linear(layer, x), layer(x)), "outside of autocast it is the layer itself"


@given(
    channels=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    size=st.integers(1, 4),
    stride=st.integers(1, 2),
    padding=st.integers(0, 1),
    transposed=st.booleans(),
    together=st.booleans(),
)
def test_a_convolution(
    channels: tuple[int, int], size: int, stride: int, padding: int, transposed: bool, together: bool
) -> None:
    torch.manual_seed(0)
    kind: Any = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(*channels, size, stride, padding if size > 2 else 0, bias=sum(channels) % 2 == 0)
    x = torch.randn(3, channels[0], 6, 5)
    if together:
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    expected, found = in_bf16(layer, x), in_bf16(convolution, layer, True, x)
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    torch.testing.assert_close(found, expected, **CLOSE)
    parameters = [x, *layer.parameters()]
    gradients = [torch.autograd.grad(out.float().square().sum(), parameters) for out in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.3)
    assert torch.equal(convolution(layer, True, x), layer(x)), "outside of autocast it is the layer itself"
    assert in_bf16(convolution, layer, True, x[0]).shape == layer(x[0]).shape, "an image without a batch"
    if transposed:
        size_of_output = [each + stride - 1 for each in layer(x).shape[2:]]
        assert in_bf16(convolution, layer, True, x, size_of_output).shape == layer(x, size_of_output).shape


def recurrent(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(5, 11, 2, **options)


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"batch_first": True}, {"bias": False}])
@pytest.mark.parametrize("kind", aligned.RECURRENT)
def test_a_recurrent_layer(kind: Any, options: dict[str, Any]) -> None:
    layer = recurrent(kind, **options)
    x = torch.randn(4, 3, 5, requires_grad=True)
    batch = 4 if layer.batch_first else 3
    zeros = torch.randn(4 if layer.bidirectional else 2, batch, 11)
    for hx in (None, (zeros, zeros + 1) if kind is nn.LSTM else zeros):
        compare(layer, x, hx)


def compare(layer: Any, x: Any, hx: Any) -> None:
    expected, found = in_bf16(layer, x, hx), in_bf16(Recurrence(layer), x, hx)
    leaves = [torch.utils._pytree.tree_leaves(each) for each in (expected, found)]
    parameters = list(layer.parameters())
    sums = []
    for one in leaves:
        floats = [each for each in one if isinstance(each, Tensor) and each.is_floating_point()]
        sums.append(torch.autograd.grad(sum(each.float().square().sum() for each in floats), parameters))
    for a, b in zip(*leaves, strict=True):
        if isinstance(a, Tensor):
            assert a.shape == b.shape
            torch.testing.assert_close(b, a, check_dtype=False, **CLOSE)
    torch.testing.assert_close(*sums, rtol=0.05, atol=0.3)


@pytest.mark.parametrize("kind", aligned.RECURRENT)
def test_sequences_of_many_lengths(kind: Any) -> None:
    packed = pack_padded_sequence(torch.randn(6, 3, 5), torch.tensor([2, 6, 3]), enforce_sorted=False)
    compare(recurrent(kind), packed, None)


def test_which_layers_it_takes() -> None:
    class Own(nn.Linear):
        pass

    large, small, even = nn.Linear(650, 1001), nn.Linear(65, 10), nn.Linear(1024, 1024)
    odd, projected, narrow = nn.LSTM(64, 650), nn.LSTM(64, 650, proj_size=3), nn.GRU(8, 10)
    model = nn.ModuleList([large, small, even, Own(650, 1001), odd, projected, narrow, nn.LSTM(64, 64)])
    assert odd_layers(model, Plan("cuda", precision="bf16")) == [large, odd]


def test_which_convolutions_it_takes() -> None:
    class Own(nn.Conv2d):
        pass

    first, last, one = nn.Conv2d(3, 64, 7, 2, 3), nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Conv2d(16, 1, 3)
    patches, even, grouped = nn.Conv2d(3, 192, 16, 16), nn.Conv2d(8, 16, 3, 1, 1), nn.Conv2d(6, 12, 3, groups=3)
    mirrored, whole = nn.Conv2d(3, 64, 3, padding=1, padding_mode="reflect"), nn.Conv2d(8, 16, 4)
    model = nn.ModuleList([first, last, one, patches, even, grouped, mirrored, Own(3, 8, 3), whole])
    apart = Plan("cuda", precision="bf16", graph=1)
    together = Plan("cuda", precision="bf16", channels_last=True)
    assert odd_layers(model, together) == [first, last, one, patches, whole]
    assert odd_layers(model, apart) == [patches]
    assert odd_layers(model, Plan("cuda", precision="bf16")) == []


def test_it_is_applied_and_undone() -> None:
    model = nn.Sequential(nn.Linear(650, 1001))
    undo = list(AlignedLever().apply(model, [], Plan("cuda", precision="bf16", levers=("aligned",))))
    assert "forward" in vars(model[0])
    for each in undo:
        each()
    assert "forward" not in vars(model[0])


@pytest.mark.gpu
def test_on_a_gpu_a_step_is_nearly_the_same() -> None:
    import hotloop

    weights = []
    for levers in ((), ("aligned",)):
        torch.manual_seed(0)

        class Words(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.lstm, self.head = nn.Embedding(1001, 330), nn.LSTM(330, 330, 2), nn.Linear(330, 1001)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.lstm(self.embed(x))[0]).transpose(1, 2)

        model = Words()
        x = torch.randint(1001, (16, 12))
        plan = Plan("cuda", precision="bf16", graph=1, levers=levers)
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), plan=plan)
        loop.fit([(x, x.roll(1))] * 12, epochs=1, progress=False, monitor=False)
        weights.append([p.detach().cpu().clone() for p in model.parameters()])
    torch.testing.assert_close(*weights, rtol=0, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("others", [(), ("kernels",)])
def test_on_a_gpu_convolutions_with_odd_channels_train_nearly_the_same(others: tuple[str, ...]) -> None:
    import hotloop

    x = torch.rand(32, 3, 32, 32)
    weights, losses = [], []
    for levers in (others, ("aligned", *others)):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(3, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2)),
            *(nn.ConvTranspose2d(32, 20, 4, 2, 1, bias=False), nn.ReLU()),
            *(nn.Conv2d(20, 3, 3, padding=1), nn.Sigmoid()),
        )
        plan = Plan("cuda", precision="bf16", channels_last=True, graph=1, levers=levers)
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), plan=plan)
        report = loop.fit([(x, x)] * 12, epochs=2, progress=False, monitor=False)
        losses.append([epoch.loss for epoch in report.epochs])
        weights.append({name: p.detach().cpu().clone() for name, p in model.named_parameters() if name != "0.bias"})
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=5e-3)
