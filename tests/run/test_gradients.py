"""Logs hold the norm of the gradient before clipping, computed in steps that are logged; `clip_value` is PyTorch's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import BadArgument

from .conftest import Kept


@pytest.fixture
def each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.run.parts.journal.EVERY", 0.0)


def norms_in(log: Kept, name: str = "gradient norm") -> dict[int, float | None]:
    return {step: numbers[name] for step, numbers in log.entries if name in numbers}


def data() -> DataLoader[Any]:
    x = torch.linspace(-3, 5, 48 * 3).view(48, 3)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def loop_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> hotloop.Loop:
    return hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", plan="plain", **options)


def by_hand(clip_norm: float | None, clip_value: float | None, accumulate: int = 1) -> tuple[nn.Module, list[float]]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, nesterov=True)
    batches, norms = list(data()), []
    for start in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        for x, y in batches[start : start + accumulate]:
            (nn.functional.mse_loss(model(x), y) / accumulate).backward()
        norms.append(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item())
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
    return model, norms


@pytest.mark.usefixtures("each_step")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.5}, {"clip_value": 0.1}])
def test_the_norm_is_that_before_clipping(clip: dict[str, float], accumulate: int) -> None:
    model, log = network(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, nesterov=True)
    loop_of(model, optimizer, accumulate=accumulate, **clip).fit(data(), progress=False, monitor=False, log=log)
    twin, norms = by_hand(clip.get("clip_norm"), clip.get("clip_value"), accumulate)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    if accumulate == 1:
        assert norms_in(log) == {step: pytest.approx(norm, rel=1e-5) for step, norm in enumerate(norms, 1)}
    else:
        told = [norm for step, norm in norms_in(log).items() if step]
        assert told == pytest.approx(norms, rel=1e-5), "once in a window"


@pytest.mark.usefixtures("each_step")
def test_each_objective_has_its_norm() -> None:
    model, log = nn.ModuleDict({"a": network(), "b": network()}), Kept()
    optimizers = {name: torch.optim.SGD(part.parameters(), 0.01) for name, part in model.items()}

    def goal(name: str, factor: float) -> Any:
        return lambda model, batch: factor * nn.functional.mse_loss(model[name](batch[0]), batch[1])

    objectives = {"a": goal("a", 1.0), "b": goal("b", 3.0)}
    loop = hotloop.Loop(model, optimizers, objective=objectives, device="cpu", plan="plain")
    loop.fit(data(), progress=False, monitor=False, log=log)
    first = {name: norms_in(log, f"gradient norm/{name}")[2] for name in "ab"}
    assert first["b"] == pytest.approx(3 * first["a"])


def test_steps_that_are_not_logged_compute_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.run.parts.journal.EVERY", 60.0)
    calls: list[int] = []
    plain = nn.utils.get_total_norm

    def counted(*arguments: Any, **options: Any) -> Tensor:
        calls.append(1)
        return plain(*arguments, **options)

    monkeypatch.setattr("torch.nn.utils.get_total_norm", counted)
    for log, expected in ((Kept(), 1), (None, 0)):
        model = network()
        calls.clear()
        loop_of(model, torch.optim.SGD(model.parameters(), 1e-3)).fit(data(), progress=False, monitor=False, log=log)
        assert len(calls) == expected, "the first step alone"


def test_both_clips_are_refused_and_wrong_ones_too() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for wrong in ({"clip_value": 0}, {"clip_value": -1.0}, {"clip_value": True}, {"clip_norm": 1.0, "clip_value": 1.0}):
        with pytest.raises(BadArgument, match="clip_value"):
            loop_of(model, optimizer, **wrong)
    with pytest.raises(BadArgument, match=r"a plan with clip_value=0\.5"):
        hotloop.Loop(model, optimizer, nn.MSELoss(), plan=hotloop.Plan("cpu", clip_value=0.5), clip_value=0.1)


def fitted_on_gpu(log: Kept | None, epochs: int = 20, **plan: Any) -> None:
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loop = hotloop.Loop(model, optimizer, nn.MSELoss(), plan=hotloop.Plan("cuda", stream="resident", **plan))
    loop.fit(data(), epochs=epochs, progress=False, monitor=False, log=log)


@pytest.mark.gpu
@pytest.mark.usefixtures("each_step")
@pytest.mark.parametrize("graph", [0, 1, 3])
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.5}, {"clip_value": 0.1}])
def test_norms_of_captured_steps_are_those_of_eager_ones(clip: dict[str, float], graph: int) -> None:
    log, model, expected = Kept(), network(), []
    fitted_on_gpu(log, graph=graph, **clip)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for x, y in [batch for _ in range(20) for batch in data()]:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        expected.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        if "clip_norm" in clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip["clip_norm"])
        if "clip_value" in clip:
            nn.utils.clip_grad_value_(model.parameters(), clip["clip_value"])
        optimizer.step()
    norms, at = list(norms_in(log).values()), 0
    for norm in norms:  # each is that of its step, or of one a moment before
        at = next((n for n in range(at, len(expected)) if expected[n] == pytest.approx(norm, rel=1e-3)), len(expected))
    assert at < len(expected)
    # Those that have not come when the next step is asked for are left out: how many depends on the machine.
    assert len(norms) > (1 if graph and "clip_value" in clip else 3), "what a replay leaves is clipped by value"


@pytest.mark.gpu
@pytest.mark.usefixtures("each_step")
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.5}])
def test_norms_add_no_synchronization(clip: dict[str, float]) -> None:
    counted = []
    for log in (None, None, Kept()):  # the first run warms up
        with hotloop.waits("cuda") as seen:
            fitted_on_gpu(log, epochs=5, **clip)
        counted.append(len(seen))
    assert counted[2] <= counted[1]
