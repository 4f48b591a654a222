"""Depthwise convolutions by hotloop's kernels: those of PyTorch, whatever the geometry."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop.kernels.convolutions import convolved, is_awkward
from hotloop.kernels.depthwise import can_be_depthwise, is_depthwise

BF16 = torch.bfloat16


def layer_of(channels: int, size: Any = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, size, groups=channels, **options)


@pytest.mark.parametrize(
    ("layer", "is_known"),
    [
        (layer_of(16), True),
        (layer_of(58, 5, stride=2, padding=2), True),
        (layer_of(16, (1, 7), stride=(1, 2), dilation=2), True),
        (nn.Conv2d(16, 16, 3), False),
        (nn.Conv2d(16, 32, 3, groups=16), False),
        (nn.Conv2d(16, 16, 3, groups=4), False),
        (nn.Conv2d(1, 1, 3), False),
        (layer_of(15), False),
        (layer_of(16, 9), False),
        (layer_of(16, stride=3), False),
        (layer_of(16, padding="same"), False),
        (layer_of(16, padding=1, padding_mode="circular"), False),
        (nn.ConvTranspose2d(16, 16, 3, groups=16), False),
    ],
)
def test_what_the_kernels_know(layer: nn.Module, is_known: bool) -> None:
    assert is_depthwise(layer) is is_known


def test_where_there_are_no_kernels_it_is_the_convolution_of_pytorch() -> None:
    torch.manual_seed(0)
    layer, batch = layer_of(16, 3, stride=2, padding=1), torch.randn(2, 16, 9, 9)
    assert is_awkward(layer)
    assert not can_be_depthwise(layer, batch, BF16)
    torch.testing.assert_close(convolved(layer, batch, torch.float32, layer.bias), layer(batch))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layer", [layer_of(16), layer_of(16, 7), nn.Conv2d(3, 16, 3), nn.Conv2d(16, 3, 3)])
@pytest.mark.parametrize("shape", [(2, 15, 9, 9), (2, 17, 9, 9), (2, 16, 2, 2), (2, 4, 9, 9)])
def test_a_batch_that_does_not_fit_is_refused_as_pytorch_refuses_it(
    layer: nn.Conv2d, shape: tuple[int, ...], device: str
) -> None:
    batch = torch.randn(shape, device=device)
    with pytest.raises(RuntimeError) as expected, torch.autocast(device, BF16):
        layer.to(device)(batch)
    with pytest.raises(RuntimeError) as found, torch.autocast(device, BF16):
        convolved(layer, batch, BF16, layer.bias)
    assert str(found.value).split(",")[0] == str(expected.value).split(",")[0]


def compare(layer: nn.Conv2d, batch: Tensor, dtype: torch.dtype) -> None:
    """Output and gradients against those of fp32, from an image that has the digits of two bytes."""
    layer = layer.cuda()
    found, plain = (batch.detach().clone().to(memory_format=torch.channels_last).requires_grad_() for _ in range(2))
    wanted = F.conv2d(plain, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    slope = torch.randn_like(wanted).to(dtype).float()
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(wanted, [plain, *parameters], slope)
    output = convolved(layer, found.to(dtype), dtype, layer.bias)
    assert output.dtype == dtype
    assert output.is_contiguous(memory_format=torch.channels_last)
    gradients = torch.autograd.grad(output, [found, *parameters], slope.to(dtype))
    digits = 2**-8 if dtype == BF16 else 2**-10
    torch.testing.assert_close(output.float(), wanted, rtol=digits, atol=1e-4)
    torch.testing.assert_close(gradients[0], expected[0], rtol=digits, atol=1e-4)
    for own, theirs in zip(gradients[1:], expected[1:], strict=True):  # sums in fp32 of thousands of products
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()) + 1e-4)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with is computed in all digits of fp32."""
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("channels", [2, 8, 16, 24, 58, 96, 232, 576])
@pytest.mark.parametrize("stride", [1, 2])
def test_on_a_gpu_channels_and_strides(channels: int, stride: int) -> None:
    torch.manual_seed(channels)
    batch = torch.randn(3, channels, 13, 15, device="cuda").to(BF16).float()
    compare(layer_of(channels, 3, stride=stride, padding=1), batch, BF16)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (3, {}),
        (3, {"padding": 1, "bias": False}),
        (3, {"padding": 2, "dilation": 2}),
        (3, {"padding": 4, "dilation": 4, "stride": 2}),
        (5, {"padding": 2}),
        (5, {"padding": 2, "stride": 2}),
        (5, {"padding": 4, "stride": 2, "dilation": 2}),
        (7, {"padding": 3}),
        (7, {"padding": 3, "stride": 2}),
        (7, {"padding": 6}),
        (2, {"stride": 2}),
        (4, {"padding": 1, "stride": 2}),
        ((1, 7), {"padding": (0, 3)}),
        ((7, 1), {"padding": (3, 0), "stride": (1, 2)}),
        ((3, 5), {"padding": (0, 2), "stride": (2, 1), "dilation": (2, 1)}),
    ],
)
def test_on_a_gpu_geometries(size: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 40, 17, 22, device="cuda").to(dtype).float()
    compare(layer_of(40, size, **options), batch, dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (1, 16, 2, 3), (64, 16, 56, 56), (5, 64, 3, 70), (33, 96, 14, 14)])
def test_on_a_gpu_sizes(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    compare(layer_of(shape[1], 3, padding=1), torch.randn(shape, device="cuda").to(BF16).float(), BF16)


@pytest.mark.gpu
def test_on_a_gpu_the_same_bits_each_time_and_parts_of_other_tensors() -> None:
    torch.manual_seed(0)
    layer = layer_of(24, 5, padding=2).cuda()
    whole = torch.randn(8, 32, 20, 20, device="cuda").to(BF16, memory_format=torch.channels_last)
    parts = [whole[:, 1:25], whole[:, 1:25].clone(), whole[:, 1:25].contiguous()]
    results = []
    for part in parts:
        image = part.detach().requires_grad_()
        output = convolved(layer, image, BF16, layer.bias)
        results.append((output, *torch.autograd.grad(output.float().square().sum(), [image, *layer.parameters()])))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_on_a_gpu_only_what_is_asked_for_gets_a_gradient() -> None:
    layer = layer_of(16, 3, padding=1).cuda()
    batch = torch.randn(2, 16, 8, 8, device="cuda", dtype=BF16)
    convolved(layer, batch, BF16, layer.bias).sum().backward()
    assert layer.weight.grad is not None
    assert batch.grad is None
    layer.requires_grad_(False)
    batch.requires_grad_()
    convolved(layer, batch, BF16, layer.bias).sum().backward()
    assert batch.grad is not None


@pytest.mark.gpu
def test_on_a_gpu_a_network_trains_with_them_as_without() -> None:
    import hotloop

    def trained(levers: tuple[str, ...]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.Hardswish()),
            *(layer_of(16, 5, padding=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 1)),
            *(layer_of(24, 3, stride=2, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4)),
        )
        x = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        plan = hotloop.Plan("cuda", precision="bf16", channels_last=True, graph=1, levers=levers)
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.05), nn.CrossEntropyLoss(), plan=plan)
        report = loop.fit([(x, x.mean((1, 2, 3)).gt(0).long())] * 12, epochs=2, progress=False, monitor=False)
        assert loop.plan.graph == 1
        return [epoch.loss for epoch in report.epochs]

    plain = trained(())
    assert trained(("aligned",)) == pytest.approx(plain, rel=0.02)
    assert trained(("aligned", "kernels")) == pytest.approx(plain, rel=0.02)
