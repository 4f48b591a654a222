"""Layers whose output is computed later: whatever a model does with it, the numbers are those of the plain model."""

import copy
from collections.abc import Callable
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.reference import ReferenceKernels
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hotloop.kernels import images, layers, lazy
from hotloop.kernels.layers import fuse, layers_to_fuse
from hotloop.kernels.lazy import LazyImage

from ..thorough import dealt


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels, computed by PyTorch; the names of those that were launched."""
    launched: list[str] = []

    class Counted(ReferenceKernels):
        def launch(self, name: str, *arguments: object) -> None:
            launched.append(name)
            super().launch(name, *arguments)

    def is_image(x: Tensor) -> bool:
        together = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and x.shape[1] % 8 == 0
        return together and x.dtype == torch.bfloat16

    monkeypatch.setattr(images, "kernels_for", lambda device, dtype, *macros: Counted(macros))
    monkeypatch.setattr(images, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for module in (images, lazy, layers):
        monkeypatch.setattr(module, "is_image", is_image)
    return launched


class Model(nn.Module):
    """Two convolutions, with whatever lies between them."""

    def __init__(self, between: Callable[["Model", Tensor], Tensor], *, bias: bool = True) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=bias), nn.BatchNorm2d(8)
        self.second, self.other = nn.Conv2d(8, 16, 3, padding=1, bias=bias), nn.BatchNorm2d(16)
        self.groups, self.other_groups = nn.GroupNorm(4, 8), nn.GroupNorm(2, 16)
        self.third, self.short = nn.Conv2d(16, 16, 3, padding=1, bias=bias), nn.Conv2d(8, 16, 1)
        self.pool, self.head, self.time = nn.MaxPool2d(2), nn.Linear(16, 4), nn.Linear(8, 16)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self, x).float().mean((2, 3)))


def tutorial(model: Model, x: Tensor) -> Tensor:
    x = model.pool(F.relu(model.norm(model.first(x))))
    return model.pool(F.relu(model.other(model.second(x)), inplace=True))


def without_norms(model: Model, x: Tensor) -> Tensor:
    return F.max_pool2d(F.gelu(model.second(model.pool(torch.relu(model.first(x))))), 2)


def residual(model: Model, x: Tensor) -> Tensor:
    x = F.silu(model.norm(model.first(x)))
    out = model.other(model.second(x))
    out += torch.cat([x, x], 1)
    return F.relu(out)


def two_residuals(model: Model, x: Tensor) -> Tensor:
    x = model.norm(model.first(x))
    twice = model.other(model.second(F.relu(x)))
    return F.leaky_relu(model.other(model.second(x)) + twice, 0.1)


def used_twice(model: Model, x: Tensor) -> Tensor:
    """The output before and after its activation, as pre-activation networks do."""
    normed = model.norm(model.first(x))
    return model.second(F.relu(normed)) + model.second(normed) * normed.mean()


def changed_in_place(model: Model, x: Tensor) -> Tensor:
    y = model.norm(model.first(x))
    z = F.relu(y)
    y.add_(1.0)
    F.relu_(y)
    return model.second(y * z)


def looked_at(model: Model, x: Tensor) -> Tensor:
    y = model.norm(model.first(x))
    assert y.shape == (x.shape[0], 8, *x.shape[2:])
    assert y.requires_grad
    assert y.dim() == 4
    with torch.no_grad():
        scale = y.abs().mean() + F.relu(y).mean()
    return model.second(y / scale)


def recomputed(model: Model, x: Tensor) -> Tensor:
    inside = checkpoint(lambda x: F.relu(model.norm(model.first(x))), x, use_reentrant=False)
    return model.other(model.second(inside))


def ends_with_a_norm(model: Model, x: Tensor) -> Tensor:
    return model.other(model.second(model.first(x)))


def odd_windows(model: Model, x: Tensor) -> Tensor:
    return model.second(F.max_pool2d(F.relu(model.norm(model.first(x))), 3, 3))


def other_windows(model: Model, x: Tensor) -> Tensor:
    return model.second(F.max_pool2d(F.relu(model.norm(model.first(x))), 3, 2, 1))


def groups(model: Model, x: Tensor) -> Tensor:
    x = F.silu(model.groups(model.first(x)))
    return model.pool(F.relu(model.other_groups(model.second(x))))


def diffusion(model: Model, x: Tensor) -> Tensor:
    """A block of a UNet: numbers for each image and channel are added between two layers, and the short cut after."""
    x = model.first(x)
    inside = model.second(F.silu(model.groups(x))) + model.time(x.float().mean((2, 3)))[:, :, None, None]
    out = model.third(F.silu(model.other_groups(inside)))
    return F.relu(out + model.short(x))


def shifted_for_all(model: Model, x: Tensor) -> Tensor:
    x = model.first(x)
    x += model.time.bias[None, :8, None, None]
    return F.relu(model.second(F.silu(x)) + model.time.bias.view(1, -1, 1, 1)) + model.short(x)


def shifted_before_a_batch_norm(model: Model, x: Tensor) -> Tensor:
    x = model.first(x)
    return F.relu(model.other(model.second(x) + model.time(x.float().mean((2, 3)))[:, :, None, None]))


def two_convolutions(model: Model, x: Tensor) -> Tensor:
    x = model.first(x)
    return model.other_groups(model.second(x) + model.short(x)) + model.second(x)


STYLES = [
    *(tutorial, without_norms, residual, two_residuals, used_twice, changed_in_place, looked_at, recomputed),
    *(ends_with_a_norm, odd_windows, other_windows, groups, diffusion, shifted_for_all, shifted_before_a_batch_norm),
    two_convolutions,
]


def trained(model: nn.Module, steps: int = 3) -> tuple[list[float], nn.Module]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        x = torch.randn(6, 3, 7, 8, generator=generator).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), torch.arange(6) % 4)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def fused(model: nn.Module) -> nn.Module:
    for layer, forward in fuse(model):
        layer.forward = forward
    return model


@pytest.mark.parametrize(("style", "bias"), dealt(STYLES, [False, True]))
def test_a_training_is_that_of_the_plain_model(style: Callable[..., Tensor], bias: bool, on_a_cpu: list[str]) -> None:
    torch.manual_seed(0)
    model = Model(style, bias=bias).to(memory_format=torch.channels_last)
    losses, plain = trained(copy.deepcopy(model))
    same, lazily = trained(fused(model))
    assert on_a_cpu, "no kernel was used"
    assert same == pytest.approx(losses, abs=0.01)
    buffers = dict(lazily.named_buffers())
    for name, expected in plain.named_buffers():
        torch.testing.assert_close(buffers[name], expected, rtol=0.02, atol=0.01)
    for (name, mine), theirs in zip(lazily.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.01, msg=lambda text, name=name: f"{name}: {text}")
        assert (mine.grad is None) == (theirs.grad is None), name


def test_what_comes_after_a_layer_is_part_of_its_kernel(on_a_cpu: list[str]) -> None:
    model = fused(Model(tutorial).to(memory_format=torch.channels_last))
    trained(model, 1)
    block = ["statistics", "normalization", "pool_forward"]
    assert on_a_cpu == block * 2 + ["gradient_sums", "normalization_gradient", "pool_backward"] * 2
    on_a_cpu.clear()
    trained(fused(Model(residual).to(memory_format=torch.channels_last)), 1)
    assert on_a_cpu[:6] == ["statistics", "normalization", "forward"] * 2


def test_a_block_of_a_unet_is_read_and_written_once_for_each_layer(on_a_cpu: list[str]) -> None:
    trained(fused(Model(diffusion).to(memory_format=torch.channels_last)), 1)
    normed = ["statistics", "group_normalization", "forward"]
    assert on_a_cpu[: on_a_cpu.index("gradient_sums")] == [
        *normed,
        *("shift_scales", "forward"),  # the output of the first convolution, which is used by itself as well
        *normed,
        *("shift_scales", "forward"),  # two convolutions, their sum and its activation
    ]


def test_evaluation_is_left_alone(on_a_cpu: list[str]) -> None:
    model = fused(Model(tutorial).to(memory_format=torch.channels_last)).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert type(model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))) is Tensor
    assert set(on_a_cpu) <= {"pool_forward"}


@pytest.mark.parametrize("change", ["double", "bfloat16", "meta"])
def test_a_model_that_changes_afterwards_is_left_alone(change: str, on_a_cpu: list[str]) -> None:
    """The kernels read weights by their address: of another dtype or device it would be something else."""
    (norm,) = fused(nn.Sequential(nn.BatchNorm2d(8)))
    assert isinstance(norm(image()), LazyImage)
    on_a_cpu.clear()
    norm = norm.to("meta") if change == "meta" else getattr(norm, change)()
    with suppress(RuntimeError, NotImplementedError):  # PyTorch does not take all of them either
        assert type(norm(image())) is Tensor
    assert not on_a_cpu


def test_nothing_is_recorded_where_nothing_should_be() -> None:
    (norm, pool) = fused(nn.Sequential(nn.BatchNorm2d(8), nn.MaxPool2d(2)))
    y = norm(image())
    with torch.no_grad():
        assert not pool(y).requires_grad
        assert not F.max_pool2d(F.relu(y), 2).requires_grad
    assert pool(y).requires_grad


def test_other_layers_are_left_alone() -> None:
    class Own(nn.BatchNorm2d): ...

    replaced = nn.BatchNorm2d(8)
    replaced.forward = lambda x: x
    model = nn.Sequential(
        *(Own(8), nn.BatchNorm2d(12), nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8, momentum=None), replaced),
        *(nn.Conv2d(8, 8, 3, bias=False), nn.Conv2d(8, 8, 3, padding_mode="circular", padding=1), nn.SyncBatchNorm(8)),
        *(nn.MaxPool2d(3, 2), nn.MaxPool2d(2, return_indices=True), nn.MaxPool2d(2, ceil_mode=True)),
    )
    assert layers_to_fuse(model) == []


def image() -> Tensor:
    return torch.randn(2, 8, 4, 4).bfloat16().to(memory_format=torch.channels_last).requires_grad_()


def test_an_input_or_a_residual_that_changes_before_it_is_used_is_an_error() -> None:
    (norm,) = fused(nn.Sequential(nn.BatchNorm2d(8)))
    for call in (norm, lambda residual: norm(image()) + residual):
        x = image() * 1
        y = call(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="changed in place"):
            y.sum()


def test_a_function_of_ones_own_gets_an_error_and_no_wrong_numbers() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient * 2

    (norm,) = fused(nn.Sequential(nn.BatchNorm2d(8)))
    y = norm(image())
    assert isinstance(y, LazyImage)
    with pytest.raises(NotImplementedError, match="an own autograd Function"):
        Double.apply(y).sum().backward()


def test_a_second_derivative_is_an_error() -> None:
    (norm,) = fused(nn.Sequential(nn.BatchNorm2d(8)))
    x = image()
    (gradient,) = torch.autograd.grad(norm(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.float().square().sum().backward()
