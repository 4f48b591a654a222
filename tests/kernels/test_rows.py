"""Layer normalisation and the gradients of biases, beside PyTorch's in fp64."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hotloop.kernels.rows import RowKernels, column_sums

HALVES = [torch.bfloat16, torch.float16]


def near(found: Tensor, expected: Tensor, at_most: float) -> None:
    scale = expected.abs().max() + 1e-12
    assert found.shape == expected.shape
    assert ((found.double() - expected).abs().max() / scale).item() < at_most


def test_on_a_cpu_they_compute_as_before() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    x = torch.randn(3, 5, 8)
    expected = model(x)
    with RowKernels():
        assert torch.equal(model(x), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 24, 384, 768, 1000, 1024, 1032, 3072, 4096, 5120, 8192])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("given", [torch.float32, None])
def test_on_a_gpu_a_layer_norm(width: int, dtype: torch.dtype, given: torch.dtype | None) -> None:
    torch.manual_seed(0)
    for shape in ((1,), (3, 7), (1300,)):
        layer = nn.LayerNorm(width).cuda()
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
        x = (torch.randn(*shape, width, device="cuda") * 3 + 2).to(given or dtype).requires_grad_()
        follow = nn.Linear(width, 16).cuda()
        uses = torch.randn(*shape, width, device="cuda")
        with RowKernels(), torch.autocast("cuda", dtype):
            y = layer(x)
            after = follow(y)
        assert (y.dtype, after.dtype) == (torch.float32, dtype)
        exact = x.detach().double().requires_grad_()
        weight, bias = (p.detach().double().requires_grad_() for p in layer.parameters())
        expected = F.layer_norm(exact, (width,), weight, bias, layer.eps)
        near(y, expected, 1e-5)
        near(after, F.linear(expected, follow.weight.double(), follow.bias.double()), 0.03)
        found = torch.autograd.grad((y * uses).sum(), [x, *layer.parameters()], retain_graph=True)
        truth = torch.autograd.grad((expected * uses).sum(), [exact, weight, bias], retain_graph=True)
        for a, b in zip(found, truth, strict=True):
            near(a, b, 1e-4 if given else 0.01)
        pull = torch.randn_like(after)
        found = torch.autograd.grad((after * pull).sum() + (y * uses).sum(), [x, *layer.parameters()])
        through = (expected @ follow.weight.to(dtype).double().T * pull).sum() + (expected * uses).sum()
        truth = torch.autograd.grad(through, [exact, weight, bias])
        for a, b in zip(found, truth, strict=True):
            near(a, b, 0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 8), (5, 7, 24), (12_608, 384), (4, 4096, 1536), (70, 10_000)])
def test_on_a_gpu_sums_over_rows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = torch.randn(*shape, device="cuda").to(dtype)
    with torch.no_grad():
        first, second = column_sums(rows), column_sums(rows)
    assert torch.equal(first, second)
    near(first, rows.double().flatten(0, -2).sum(0), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"bias": False}, {"elementwise_affine": False}])
def test_on_a_gpu_a_layer_norm_without_parameters(options: dict[str, bool]) -> None:
    layer = nn.LayerNorm(64, **options).cuda()
    x = torch.randn(10, 64, device="cuda", requires_grad=True)
    uses = torch.randn(10, 64, device="cuda")
    results = []
    for mode in (RowKernels(), nullcontext()):
        with mode, torch.autocast("cuda", torch.bfloat16):
            y = layer(x)
        results.append((y, *torch.autograd.grad((y * uses).sum(), [x, *layer.parameters()])))
    for a, b in zip(*results, strict=True):
        near(a, b.double(), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("call", [F.linear, lambda x, weight, bias: torch.addmm(bias, x.flatten(0, -2), weight.T)])
def test_on_a_gpu_a_linear_layer(call: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(40, 24).cuda()
    for shape in ((6, 40), (2, 3, 40), (1, 40)):
        x = torch.randn(*shape, device="cuda", requires_grad=True)
        results = []
        for mode in (RowKernels(), nullcontext()):
            with mode, torch.autocast("cuda", torch.bfloat16):
                out = F.relu(call(x, layer.weight, layer.bias), inplace=True)
            loss = out.float().square().sum()
            gradients = torch.autograd.grad(loss, [x, *layer.parameters()], create_graph=True)
            second = torch.autograd.grad(gradients[2].square().sum(), layer.weight)
            results.append((out, *gradients, *second))
        for a, b in zip(*results, strict=True):
            near(a, b.double(), 0.02)
    layer.weight.requires_grad_(False)
    with RowKernels(), torch.autocast("cuda", torch.bfloat16):
        call(x.detach(), layer.weight, layer.bias).float().sum().backward()
    assert layer.bias.grad is not None
    assert layer.weight.grad is None


@pytest.mark.gpu
def test_on_a_gpu_a_change_in_place_is_seen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32)).cuda()
    x = torch.randn(10, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        expected = model[1](model[0](x).mul_(3))
        with RowKernels():
            found = model[1](model[0](x).mul_(3))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_on_a_gpu_parts_of_other_tensors() -> None:
    layer, head = nn.LayerNorm(64).cuda(), nn.Linear(64, 8).cuda()
    for each in (*layer.parameters(), *head.parameters()):  # as where all parameters lie in one vector
        each.data = torch.cat((each.new_zeros(1), each.detach().flatten()))[1:].view(each.shape)
    given = torch.randn(641, device="cuda")[1:].view(10, 64)
    results = []
    for mode in (RowKernels(), nullcontext()):
        x = given.detach().requires_grad_()
        with mode, torch.autocast("cuda", torch.bfloat16):
            y = layer(x)
            out = head(y)
        loss = torch.cat((out.new_zeros(1), out.flatten(), y.flatten())).square().sum()
        results.append(torch.autograd.grad(loss, [x, *layer.parameters(), *head.parameters()]))
    for a, b in zip(*results, strict=True):
        near(a, b.double(), 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_on_a_gpu_what_is_computed_again(reentrant: bool) -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).cuda()
    gradients = []
    for call in (model, partial(checkpoint, model, use_reentrant=reentrant)):
        x = torch.ones(10, 64, device="cuda").cumsum(1).requires_grad_()
        with RowKernels(), torch.autocast("cuda", torch.bfloat16):
            out = call(x)
        out.float().square().sum().backward()
        gradients.append(x.grad)
    near(gradients[1], gradients[0].double(), 0.02)


@pytest.mark.gpu
def test_on_a_gpu_a_training_is_nearly_the_same() -> None:
    import hotloop

    weights, losses = [], []
    x = torch.randn(64, 16, 64)
    for levers in ((), ("row kernels",)):
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        model = nn.Sequential(nn.Linear(64, 64), block, nn.LayerNorm(64), nn.Linear(64, 64))
        plan = hotloop.Plan("cuda", precision="bf16", graph=1, levers=levers)
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.05), nn.MSELoss(), plan=plan)
        report = loop.fit([(x, x)] * 12, epochs=2, progress=False, monitor=False)
        losses.append([epoch.loss for epoch in report.epochs])
        weights.append([p.detach().cpu().clone() for p in model.parameters()])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    torch.testing.assert_close(*weights, rtol=0, atol=5e-3)


@pytest.mark.gpu
def test_on_a_gpu_a_second_derivative_drops_the_lever_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import hotloop

    monkeypatch.setattr("hotloop.levers.base.HEAVY", 0.0)
    monkeypatch.setattr("hotloop.levers.row_kernels.MANY_ROW_SUMS", 1)
    monkeypatch.setattr("hotloop.tune.course.SLOWER", 100.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8))

    def penalised(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        score = model(x).float().square().mean()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return score + slope.square().sum()

    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), objective=penalised, device="cuda")
    loop.fit([(torch.randn(32, 64),)] * 400, epochs=10, progress=False, monitor=False)
    assert loop.plan.precision == "bf16", str(loop.tuning)
    assert "row kernels" not in loop.plan.levers
    assert {trial.lever: trial.verdict for trial in loop.tuning.trials}["row kernels"] == "dropped"
