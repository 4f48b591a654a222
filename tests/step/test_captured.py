"""What a CUDA graph froze may change in Python: it is noticed, captured again, and the steps are named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import PlanWarning
from hotloop.step.captured import CapturedStep
from hotloop.step.captured_graph import Rates
from hotloop.step.eager_calls import EagerCalls
from hotloop.step.inspection import Inspection

gpu = pytest.mark.gpu
pytestmark = pytest.mark.simulated


class Scaled(nn.Module):
    """A network with a number in Python that scales its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)
        self.scale = 1.0
        self.settings = {"bias": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def data(batches: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16 * batches, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4]), 16)


def loop_of(model: nn.Module, graph: int, **options: Any) -> hotloop.Loop:
    plan = hotloop.Plan("cuda", graph=graph, stream="resident", fused=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    options = {"loss": nn.MSELoss(), **options}
    return hotloop.Loop(model, optimizer, device="cuda", plan=plan, **options)


@gpu
@pytest.mark.parametrize(("where", "graph"), [("model", 1), ("model", 8), ("closure", 1), ("transform", 8)])
def test_a_number_that_changes_between_epochs_is_captured_again(where: str, graph: int) -> None:
    def run(graph: int) -> Tensor:
        model, weight, shift = Scaled(), 1.0, 0.0

        def objective(model: nn.Module, batch: Any) -> Tensor:
            return nn.functional.mse_loss(model(batch[0]), batch[1]) * weight

        def transform(batch: Any) -> Any:
            return [batch[0] + shift, batch[1]]

        loop, loader = loop_of(model, graph, loss=None, objective=objective), data(24)
        for epoch in range(4):
            model.scale = 1.0 + epoch * (where == "model")
            weight = 0.1 + 0.1 * epoch * (where == "closure")
            shift = float(epoch) * (where == "transform")
            loop.fit(loader, epochs=1, device_transform=transform, progress=False, monitor=False)
        return model.layer.weight.detach().clone()

    assert torch.equal(run(graph), run(0))


@gpu
@pytest.mark.parametrize("graph", [1, 8])
def test_a_number_that_changes_inside_an_epoch_is_told_with_its_steps(graph: int) -> None:
    model = Scaled()
    changed = False

    class Changing(torch.utils.data.Sampler[int]):
        def __len__(self) -> int:
            return 16 * 1600

        def __iter__(self) -> Any:
            nonlocal changed
            for i in range(len(self)):
                if i == 16 * 700 and not changed:
                    model.scale, changed = 2.0, True
                yield i % 256

    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x[:, :4]), 16, sampler=Changing())
    loop = loop_of(model, graph)
    with pytest.warns(PlanWarning, match=r"steps \d+ to \d+ may have been replayed with model.scale=1.0, which is 2.0"):
        loop.fit(loader, epochs=1, progress=False, monitor=False)
    assert loop.plan.graph == graph  # it was captured again


@gpu
@pytest.mark.parametrize(
    "effect",
    [
        lambda model: setattr(model, "calls", model.calls + 1),
        lambda model: model.log.append(1),
        lambda model: model.table.update(last=model.table.get("last", 0) + 1),
    ],
    ids=["counter", "list", "dict"],
)
def test_a_forward_with_side_effects_is_not_captured(effect: Callable[[Any], object]) -> None:
    class Counting(Scaled):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.log: list[int] = []
            self.table: dict[str, int] = {}

        def forward(self, x: Tensor) -> Tensor:
            effect(self)
            return super().forward(x)

    model = Counting()
    with pytest.warns(PlanWarning, match="in Python, which a replay"):
        loop_of(model, 1).fit(data(20), epochs=2, progress=False, monitor=False)
    assert 40 in (model.calls, len(model.log), model.table.get("last"))


class Restless(nn.Module):
    """A network whose forward pass draws random numbers, writes to buffers and may take another way."""

    def __init__(self, outputs: int = 4, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        # On a CPU the values of tensors with up to 16 numbers count as numbers, so these have more.
        self.first, self.last, self.dropout = nn.Linear(8, 32), nn.Linear(32, outputs, bias=False), nn.Dropout(0.5)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(32))
        self.scale, self.unread = torch.ones(32, device=device), torch.ones(32, device=device)
        self.parts = (torch.ones(32, device=device), {"deep": [torch.ones(32, device=device)]})
        self.other_parts = {"unread": torch.ones(32, device=device)}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu() * self.scale * self.parts[0] * self.parts[1]["deep"][0]
        self.mean.lerp_(hidden.detach().float().mean(0), 0.1)
        out: Tensor = self.last(self.dropout(hidden))
        return out.tanh() if WAY else out


WAY: list[int] = []


class Weighted(nn.Module):
    """A criterion with parts that a capture reads."""

    def __init__(self) -> None:
        super().__init__()
        self.entropy, self.dropout = nn.CrossEntropyLoss(weight=torch.ones(40)), nn.Dropout()
        self.bias = nn.Parameter(torch.zeros(40))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.entropy(self.dropout(output) + self.bias, target)
        return loss


CHANGED: dict[str, Callable[[Any, Weighted, torch.optim.Optimizer], object]] = {
    "class weights": lambda model, criterion, optimizer: setattr(criterion.entropy, "weight", torch.rand(40)),
    "a buffer": lambda model, criterion, optimizer: setattr(model, "mean", torch.rand(32)),
    "an attribute": lambda model, criterion, optimizer: setattr(model, "scale", torch.rand(32)),
    "a tuple": lambda model, criterion, optimizer: setattr(model, "parts", (torch.rand(32), model.parts[1])),
    "a list in a table": lambda model, criterion, optimizer: model.parts[1].update(deep=[torch.rand(32)]),
    "the mode of the criterion": lambda model, criterion, optimizer: criterion.eval(),
    "a frozen part of the criterion": lambda model, criterion, optimizer: criterion.bias.requires_grad_(False),
    "a hook of a weight": lambda model, criterion, optimizer: model.first.weight.register_hook(lambda grad: grad * 0),
    "a hook of a layer": lambda model, criterion, optimizer: model.first.register_forward_hook(lambda *_: None),
    "a hook of the optimizer": lambda model, criterion, optimizer: optimizer.register_step_post_hook(lambda *_: None),
}


UNCHANGED: dict[str, Callable[[Any, Weighted, torch.optim.Optimizer], object]] = {
    "nothing": lambda model, criterion, optimizer: None,
    "what is not read": lambda model, criterion, optimizer: setattr(model, "unread", torch.rand(32)),
    "parts that are not read": lambda model, criterion, optimizer: setattr(model, "other_parts", {}),
    "values": lambda model, criterion, optimizer: model.scale.zero_(),
}


def warmed_up(loop: hotloop.Loop, batch: Any, abandon: Callable[[str], None]) -> CapturedStep:
    """What would capture the steps of a loop, after it has looked at one."""
    step = loop._core.switch.step
    calls = EagerCalls(loop.model, step.eagers, step.eagers, step.run, step.levers, step.memory, None)
    captured = CapturedStep(calls, abandon)
    captured._warm_up.inspect(batch)
    return captured


def capture(captured: CapturedStep) -> None:
    """Note what a capture would freeze."""
    captured.frozen.note_capture(Inspection(), captured._warm_up.looks)


@pytest.mark.usefixtures("captures_on_the_host")
@pytest.mark.parametrize("change", [*CHANGED, *UNCHANGED])
def test_what_a_capture_froze_is_looked_at_between_epochs(change: str) -> None:
    """Without a capture: that part needs no GPU."""
    model, criterion, abandoned = Restless(40), Weighted(), list[str]()
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()])
    loop = hotloop.Loop(model, optimizer, criterion, device="cpu", plan="plain")
    batch = [torch.randn(16, 8), torch.randint(40, (16,))]
    for _ in range(3):
        loop.step(batch)
    captured = warmed_up(loop, batch, abandoned.append)
    capture(captured)
    (CHANGED | UNCHANGED)[change](model, criterion, optimizer)
    captured.frozen.check()
    assert captured.has_captures == (change in UNCHANGED)
    assert bool(abandoned) == ("hook" in change), "what it does on the host would be lost again"


@pytest.mark.usefixtures("captures_on_the_host")
def test_a_loop_by_hand_is_looked_at_before_each_step() -> None:
    """Without a capture, too. What is around a step counts there, and captures that do not last end."""
    model, abandoned = Scaled(), list[str]()
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), nn.MSELoss(), device="cpu", plan="plain")
    batch = [torch.randn(16, 8), torch.randn(16, 4)]
    loop.step(batch)
    captured = warmed_up(loop, batch, abandoned.append)
    capture(captured)
    captured.check_step()
    assert captured.has_captures
    with torch.autocast("cpu", torch.bfloat16):
        captured.check_step()
    assert not captured.has_captures
    for change in ("scale", "settings"):
        capture(captured)
        captured.check_step()
        assert captured.has_captures
        setattr(model, change, 2.0 if change == "scale" else {"bias": 0.0})
        assert not abandoned
        captured.check_step()
        assert not captured.has_captures
    assert abandoned == ["model.settings changes often between steps, and a capture freezes it"]


@pytest.mark.usefixtures("captures_on_the_host")
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "bf16"}], ids=str)
def test_a_comparison_leaves_no_trace(options: dict[str, Any]) -> None:
    """What compares a forward pass with the captured one, without a capture: that part needs no GPU."""
    model = Restless()
    loop = hotloop.Loop(
        model, torch.optim.Adam(model.parameters()), nn.MSELoss(), device="cpu", plan="plain", **options
    )
    batch = [torch.randn(16, 8), torch.randn(16, 4)]
    for _ in range(4):
        loop.step(batch)
    captured = warmed_up(loop, batch, pytest.fail)
    capture(captured)
    loop.step(batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    state, steps = torch.get_rng_state(), loop.steps
    captured.compare(batch)
    assert captured.has_captures, "it is as it was captured"
    assert torch.equal(torch.get_rng_state(), state)
    assert loop.steps == steps
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient is None or torch.equal(parameter.grad, gradient)
    loop.step(batch)
    loop.step(batch)
    WAY.append(1)
    try:
        with pytest.warns(
            PlanWarning, match=f"steps {steps + 1} to {loop.steps} may have been replayed with the operations"
        ):
            captured.compare(batch)
    finally:
        WAY.clear()
    assert not captured.has_captures, "it is captured again"


@gpu
@pytest.mark.parametrize("graph", [1, 8])
def test_comparisons_do_not_change_the_training(graph: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(every: int) -> list[Tensor]:
        monkeypatch.setattr("hotloop.step.frozen.COMPARE_EVERY", every)
        model = Restless(device="cuda")
        loop = loop_of(model, graph)
        torch.manual_seed(3)
        loop.fit(data(40), epochs=4, device_transform=jitter, progress=False, monitor=False)
        assert loop.plan.graph == graph
        return [value.detach().clone() for value in model.state_dict().values()]

    for compared, alone in zip(run(8), run(10**9), strict=True):
        assert torch.equal(compared, alone)


def jitter(batch: Any) -> Any:
    return [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]]


@gpu
@pytest.mark.parametrize("graph", [1, 8])
def test_other_work_inside_an_epoch_is_found(graph: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.step.frozen.COMPARE_EVERY", 16)
    loop = loop_of(Restless(device="cuda"), graph)
    loop.fit(data(40), epochs=1, progress=False, monitor=False)
    monkeypatch.setitem(globals(), "WAY", [1])
    with pytest.warns(PlanWarning, match="may have been replayed with the operations of an earlier step"):
        loop.fit(data(80), epochs=1, progress=False, monitor=False)


class Recurrent(nn.Module):
    """cuDNN keeps the rng state of its dropout by itself, and PyTorch makes it anew when a generator is set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(8, 16, 2, dropout=0.5), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x[None])[0][0])


@gpu
@pytest.mark.simulated(False)
@pytest.mark.filterwarnings("error:steps")
@pytest.mark.parametrize("graph", [1, 8])
def test_a_recurrent_layer_with_dropout_stays_captured(graph: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.step.frozen.COMPARE_EVERY", 8)
    loop = loop_of(Recurrent(), graph)
    report = loop.fit(data(80), epochs=4, progress=False, monitor=False)
    assert loop.plan.graph == graph
    assert report.epochs[-1].loss < report.epochs[0].loss


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.optim.Optimizer], Rates]:
    """Learning rates as a graph reads them, on a CPU, where no memory can be pinned."""
    make = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, pin_memory, **options: make(*args, **options))  # noqa: PLW0108  # it drops an argument
    return lambda optimizer: Rates([optimizer], 1, torch.device("cpu"))


def test_rates_keep_their_digits_whatever_the_default_is(rates: Callable[[torch.optim.Optimizer], Rates]) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=3e-4)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with rates(optimizer).of_step(0):
            assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(3e-4, rel=1e-6)
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.param_groups[0]["lr"] == 3e-4


def test_settings_that_a_scheduler_adds_end_no_capture(rates: Callable[[torch.optim.Optimizer], Rates]) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=3e-4)
    captured = rates(optimizer)
    OneCycleLR(optimizer, 1e-3, total_steps=10, cycle_momentum=False)
    assert captured.changed() is None
    optimizer.param_groups[0]["weight_decay"] = 0.5
    assert captured.changed() == "weight_decay"
