"""The kernels beside PyTorch's own arithmetic in fp64, on a GPU."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop.kernels.layers import fuse
from hotloop.kernels.lazy import ImageRecipe, LazyImage, image_of, pooled

pytestmark = pytest.mark.gpu

SHAPES = [(8, 64, 16, 16), (3, 8, 5, 7), (2, 24, 33, 9), (5, 520, 4, 4), (64, 16, 1, 1), (2, 2048, 3, 3)]
GROUPED = [
    *(((8, 64, 16, 16), 32), ((3, 8, 5, 7), 1), ((2, 24, 33, 9), 4), ((5, 520, 4, 4), 8), ((2, 2048, 3, 3), 32)),
    *(((64, 16, 5, 3), 16), ((2, 32, 256, 128), 8), ((300, 32, 4, 4), 2)),
]
ACTIVATIONS = {
    "none": lambda z: z,
    "relu": F.relu,
    "leaky": lambda z: F.leaky_relu(z, 0.2),
    "gelu": F.gelu,
    "tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def image(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16, mean: float = 0.5) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = (
        torch.randn(shape, generator=generator, device="cuda")
        * torch.linspace(0.5, 2, shape[1], device="cuda")[:, None, None]
    )
    return (drawn + mean).to(dtype).contiguous(memory_format=torch.channels_last)


def layer_of(channels: int) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(channels).cuda()
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5)
        layer.weight[::3] *= -1
        layer.bias.uniform_(-1, 1)
    return layer


def fused(layer: nn.Module) -> nn.Module:
    for each, forward in fuse(layer):
        each.forward = forward
    return layer


def close(
    found: Tensor, expected: Tensor, dtype: torch.dtype = torch.bfloat16, times: float = 1.0, scale: float = 1e-6
) -> None:
    """As close as one rounding to two bytes leaves it, with a little for sums of numbers of a size."""
    unit = times * (2**-8 if dtype == torch.bfloat16 else 2**-10)
    scale += expected.abs().max().item()
    error = (found.double() - expected.double()).abs()
    assert (error <= unit * expected.double().abs() + unit / 8 * scale).all(), (error.max().item(), scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_is_normalised_and_activated(shape: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
    act = ACTIVATIONS[name]
    layer = layer_of(shape[1])
    exact = copy.deepcopy(layer).double()
    x = image(shape, 0, dtype).requires_grad_()
    twin = x.detach().double().requires_grad_()
    gradient = image(shape, 1, dtype)
    lazy = fused(layer)(x.detach().requires_grad_())
    assert isinstance(lazy, LazyImage)
    y = act(layer(x))
    y = image_of(y)
    exact(twin.detach())  # the layer was called twice
    expected = act(exact(twin))
    y.backward(gradient)
    expected.backward(gradient.double())
    assert type(y) is Tensor
    assert y.dtype == dtype
    assert y.stride() == x.stride()
    close(y, expected, dtype)
    close(x.grad, twin.grad, dtype, 2)
    for mine, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
        close(mine.grad, theirs.grad, dtype, 0.25)
    torch.testing.assert_close(layer.running_mean.double(), exact.running_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.running_var.double(), exact.running_var, rtol=1e-4, atol=1e-5)
    assert layer.num_batches_tracked.item() == 2


@pytest.mark.parametrize("shift", ["none", "channel", "image"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["none", "relu", "silu"])
@pytest.mark.parametrize(("shape", "groups"), GROUPED)
def test_each_image_is_normalised(
    shape: tuple[int, ...], groups: int, name: str, dtype: torch.dtype, shift: str
) -> None:
    act = ACTIVATIONS[name]
    torch.manual_seed(0)
    layer = nn.GroupNorm(groups, shape[1]).cuda()
    nn.init.uniform_(layer.weight, -1.5, 1.5)
    nn.init.uniform_(layer.bias, -1, 1)
    exact = copy.deepcopy(layer).double()
    x = image(shape, 0, dtype).requires_grad_()
    by = torch.randn(shape[:2] if shift == "image" else shape[1], device="cuda", requires_grad=True)
    twin, by_twin = (each.detach().double().requires_grad_() for each in (x, by))
    gradient = image(shape, 1, dtype)
    if shift == "none":
        lazy = fused(layer)(x)
        expected = act(exact(twin))
    else:
        lazy = fused(layer)(LazyImage(ImageRecipe.of(x, by)))
        expected = act(exact(twin + by_twin[..., None, None]))
    lazy = act(lazy)
    assert isinstance(lazy, LazyImage)
    y = image_of(lazy)
    y.backward(gradient)
    expected.backward(gradient.double())
    assert y.dtype == dtype
    close(y, expected, dtype)
    sure = (expected.abs() > 0.01) | (expected == 0) if name == "relu" else torch.ones_like(expected, dtype=torch.bool)
    close(x.grad * sure, twin.grad * sure, dtype, 2)
    for mine, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
        close(mine.grad, theirs.grad, dtype, 0.5)
    if shift != "none":  # its gradient is zero where each channel is normalised by itself
        close(by.grad, by_twin.grad, dtype, 0.5, scale=twin.grad.abs().sum((2, 3)).max().item())


@pytest.mark.parametrize("name", ["none", "relu", "leaky"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_residual_is_added(shape: tuple[int, ...], name: str) -> None:
    act = ACTIVATIONS[name]
    layer = layer_of(shape[1])
    exact = copy.deepcopy(layer).double()
    x, residual = image(shape, 0).requires_grad_(), image(shape, 2).requires_grad_()
    twins = [each.detach().double().requires_grad_() for each in (x, residual)]
    gradient = image(shape, 1)
    lazy = act(fused(layer)(x) + residual)
    assert isinstance(lazy, LazyImage)
    assert lazy.open_recipe() is not None
    y = image_of(lazy)
    expected = act(exact(twins[0]) + twins[1])
    y.backward(gradient)
    expected.backward(gradient.double())
    close(y, expected)
    for mine, theirs in zip((x, residual), twins, strict=True):
        sure = expected.abs() > 0.02 if name != "none" else torch.ones_like(expected, dtype=torch.bool)
        if mine is residual:  # next to zero, rounding decides on which side of the bend it lies
            close(mine.grad * sure, theirs.grad * sure, times=2)


@pytest.mark.parametrize("side", [2, 3])
@pytest.mark.parametrize("name", ["relu", "gelu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_windows_are_pooled(shape: tuple[int, ...], name: str, side: int) -> None:
    if min(shape[2:]) < side:
        pytest.skip("no window fits")
    act = ACTIVATIONS[name]
    layer = layer_of(shape[1])
    exact = copy.deepcopy(layer).double()
    x = image(shape, 0).requires_grad_()
    twin = x.detach().double().requires_grad_()
    y = F.max_pool2d(act(fused(layer)(x)), side)
    assert type(y) is Tensor
    whole = act(exact(twin))
    whole = whole + (whole.bfloat16().double() - whole).detach()  # of equal ones the first is the largest
    expected = F.max_pool2d(whole, side)
    gradient = image(tuple(expected.shape), 1)
    y.backward(gradient)
    expected.backward(gradient.double())
    close(y, expected)
    # what lies between two numbers of two bytes may be rounded to either, and then another pixel is the largest
    assert F.cosine_similarity(x.grad.double().flatten(), twin.grad.flatten(), dim=0) > 0.99
    for mine, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
        close(mine.grad, theirs.grad, times=16)


@pytest.mark.parametrize("side", [2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_pooling_alone_is_that_of_pytorch_to_the_bit(shape: tuple[int, ...], side: int) -> None:
    if min(shape[2:]) < side:
        pytest.skip("no window fits")
    x = image(shape, 0)
    x.permute(0, 2, 3, 1).reshape(-1)[::5] = 1.5  # equal ones
    x[0, 0, 0, 1] = torch.nan
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = pooled(mine, side)
    expected = F.max_pool2d(theirs, side)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    gradient = image(tuple(y.shape), 1)
    y.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("per_image", [False, True])
@pytest.mark.parametrize("side", [0, 2])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_a_bias_is_added(shape: tuple[int, ...], name: str, side: int, per_image: bool) -> None:
    act = ACTIVATIONS[name]
    torch.manual_seed(0)
    bias = torch.randn(shape[:2] if per_image else shape[1], device="cuda", requires_grad=True)
    x = image(shape, 0).requires_grad_()
    twins = [x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()]
    lazy = act(LazyImage(ImageRecipe.of(x, bias)))
    expected = act(twins[0] + twins[1][..., None, None])
    expected = expected + (expected.bfloat16().double() - expected).detach()  # of equal ones the first is the largest
    y = F.max_pool2d(lazy, side) if side else image_of(lazy)
    expected = F.max_pool2d(expected, side) if side else expected
    gradient = image(tuple(y.shape), 1)
    y.backward(gradient)
    expected.backward(gradient.double())
    close(y, expected)
    close(bias.grad, twins[1].grad, times=16 if side else 4)
    assert F.cosine_similarity(x.grad.double().flatten(), twins[0].grad.flatten(), dim=0) > 0.97


def test_a_convolutions_bias_before_a_normalisation_moves_the_running_mean_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    model = model.cuda().to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    fused(model)
    x = torch.randn(8, 3, 12, 12, device="cuda").to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        y, expected = model(x), twin(x)
    y.float().square().sum().backward()
    expected.float().square().sum().backward()
    close(y, expected, times=3)
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean, rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(model[1].running_var, twin[1].running_var, rtol=1e-2, atol=2e-3)
    assert not model[0].bias.grad.any()
    assert F.cosine_similarity(model[0].weight.grad.flatten(), twin[0].weight.grad.flatten(), dim=0) > 0.995


def test_a_mean_far_from_zero_leaves_the_variance_alone() -> None:
    layer = layer_of(16)
    exact = copy.deepcopy(layer).double()
    x = image((32, 16, 16, 16), 0, torch.float16, mean=60.0)
    y = image_of(fused(layer)(x))
    close(y, exact(x.double()), torch.float16)


def test_the_same_batch_gives_the_same_bits() -> None:
    results = []
    for _ in range(3):
        torch.manual_seed(0)
        layer = layer_of(64)
        x = image((64, 64, 24, 24), 0).requires_grad_()
        y = F.relu(fused(layer)(x) + x)
        image_of(y).backward(image((64, 64, 24, 24), 1), retain_graph=True)
        groups = nn.GroupNorm(32, 64).cuda()
        z = F.silu(fused(groups)(image_of(y)))
        image_of(z).backward(image((64, 64, 24, 24), 2))
        results.append([image_of(y).detach(), x.grad, layer.weight.grad, layer.bias.grad, layer.running_var])
        results[-1] += [image_of(z).detach(), groups.weight.grad, groups.bias.grad]
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
