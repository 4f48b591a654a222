"""The lever "kernels": what it needs, that it is undone, and whole trainings on a GPU."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.levers.kernels import KernelsLever
from hotloop.plan import Plan

PLAN = Plan("cuda", precision="bf16", channels_last=True, graph=1)


def network(width: int = 16, side: int = 16) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, width), (width, 2 * width)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * (side // 4) ** 2, 10))


def test_it_is_applied_and_undone() -> None:
    model = network()
    undo = list(KernelsLever().apply(model, [], PLAN))
    assert [type(layer) for layer in model.modules() if "forward" in vars(layer)] == [
        *(nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d) * 2
    ]
    for each in undo:
        each()
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_a_compiled_model_computes_by_its_compiler() -> None:
    plan = KernelsLever().pull(Plan("cuda", precision="bf16", channels_last=True, graph=1, compile="default"))
    assert not KernelsLever().acts(plan)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.into(x)))
        for layer, norm in zip(self.layers, self.norms[1:], strict=True):
            x = F.relu(norm(layer(x)) + x, inplace=True)
        return self.head(x.mean((2, 3)))


class Grouped(nn.Module):
    """As in a UNet: groups of channels are normalised, and each image is told something between two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.tell = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(3, 32)
        self.first = nn.Sequential(nn.GroupNorm(8, 16), nn.SiLU(), nn.Conv2d(16, 32, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1))
        self.short, self.head = nn.Conv2d(16, 32, 1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        told, x = self.tell(x.mean((2, 3))), self.into(x)
        x = self.second(self.first(x) + told[:, :, None, None]) + self.short(x)
        return self.head(x.mean((2, 3)))


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(256, 3, 16, 16, generator=generator)
    labels = (pictures.mean((1, 2, 3)) * 400).long().clamp(-5, 4) + 5
    return DataLoader(TensorDataset(pictures, labels), 32)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [0, 1, 4])
@pytest.mark.parametrize("make", [network, Residual, Grouped])
def test_a_training_on_a_gpu_is_nearly_the_same(make: Any, graph: int) -> None:
    found = []
    for levers in ((), ("kernels",), ("kernels",)):
        model = make()
        plan = Plan("cuda", precision="bf16", channels_last=True, graph=graph, levers=levers)
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.05), nn.CrossEntropyLoss(), plan=plan)
        report = loop.fit(data(), epochs=3, validate=data(), progress=False, monitor=False)
        found.append(([epoch.loss for epoch in report.epochs], {k: v.clone() for k, v in model.state_dict().items()}))
        assert loop.plan.graph == graph
    (plain, weights), (fused, near), (again, same) = found
    assert fused == pytest.approx(plain, rel=0.02)
    assert again == fused
    assert all(torch.equal(near[name], same[name]) for name in near), "it can be repeated to the bit"
    noisy = {
        name for name in weights if name.endswith(("running_mean", "0.bias", "4.bias"))
    }  # a bias that has no effect
    for name in weights.keys() - (noisy if make is network else set()):
        torch.testing.assert_close(near[name], weights[name], rtol=0.05, atol=0.02)


@pytest.mark.gpu
def test_a_default_run_on_a_gpu_uses_it_and_a_gradient_penalty_does_without() -> None:
    def penalised(model: nn.Module, batch: Any) -> Tensor:
        pictures = batch[0].requires_grad_()
        scores = model(pictures)
        (gradient,) = torch.autograd.grad(scores.float().sum(), pictures, create_graph=True)
        return F.cross_entropy(scores.float(), batch[1]) + 0.01 * gradient.float().square().mean()

    many = [(torch.randn(256, 3, 32, 32), torch.randint(10, (256,))) for _ in range(60)]
    wide = network(32, 32)
    for objective in (None, penalised):
        model = copy.deepcopy(wide)
        given = {"objective": objective} if objective else {"loss": nn.CrossEntropyLoss()}
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.05), **given)
        loop.fit(many, epochs=20, progress=False, monitor=False)
        assert ("kernels" in loop.plan.levers) == (objective is None), str(loop.tuning)
        assert loop.plan.precision == "bf16", str(loop.tuning)
