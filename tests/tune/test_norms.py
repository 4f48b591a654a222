"""Norms of the gradient are watched while something rounds: a jump that fp32 does not have drops a lever."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.levers import Lever
from hotloop.levers.base import LeverRule
from hotloop.placement.waits import Waits
from hotloop.tune.spikes import NormSpikes

from .runs import endless, with_lever

BEGINS = 50  # batches after which gradients jump: the gate was asked again by then, and five norms were seen
STEPS = 80  # looks are after 4 batches, 8, 16, and then every 8


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is a number of times too large."""

    @staticmethod
    def forward(context: Any, x: Tensor, times: Tensor) -> Tensor:
        context.times = times
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * context.times, None


def scaled(x: Tensor, times: Any) -> Tensor:
    result: Tensor = Scaled.apply(x, times)  # type: ignore[no-untyped-call]
    return result


class Exploding(nn.Module):
    """A small network whose gradients are `times` what they should be, in bf16 or in any precision."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("times", torch.ones(()))  # a CUDA graph reads what it holds then
        self.in_any_precision = False
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        result = self.layers(x).float()
        explodes = self.in_any_precision or torch.is_autocast_enabled(self.device)
        return scaled(result, self.times) if explodes else result


@pytest.fixture
def passes() -> Iterator[list[bool]]:
    """Of each forward pass, whether it computes in bf16."""
    seen: list[bool] = []

    def note(module: nn.Module, given: object) -> None:
        if isinstance(module, Exploding):
            seen.append(torch.is_autocast_enabled(module.device))

    hook = register_module_forward_pre_hook(note)
    yield seen
    hook.remove()


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Norms that were computed."""
    seen: list[Tensor] = []
    plain = nn.utils.get_total_norm

    def noted(*arguments: Any, **options: Any) -> Tensor:
        norm = plain(*arguments, **options)
        seen.append(norm)
        return norm

    monkeypatch.setattr("torch.nn.utils.get_total_norm", noted)
    return seen


@pytest.fixture
def in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every CPU has bf16, every model is worth it, nothing is too slow; and looks come soon, on a GPU too."""
    monkeypatch.setattr("hotloop.levers.bf16.has_amx", lambda: True)
    monkeypatch.setattr("hotloop.levers.base.HEAVY", 0.0)
    monkeypatch.setattr("hotloop.tune.course.SURELY_SLOWER", 100.0)
    monkeypatch.setattr("hotloop.tune.course.SLOWER", 100.0)
    monkeypatch.setattr("hotloop.tune.spikes.FIRST_LOOK", 4)
    monkeypatch.setattr("hotloop.tune.spikes.LOOKS_SHARE", 1e9)
    monkeypatch.setattr("hotloop.tune.spikes.MOST_BETWEEN_LOOKS", 8)
    monkeypatch.setattr("hotloop.tune.rounding.AUDITS", (20, 1000))


def data(batches: int = 8) -> DataLoader[Any]:
    random = torch.Generator().manual_seed(0)
    x = torch.rand(batches * 8, 8, generator=random)
    y = x.sum(1, keepdim=True) + torch.randn(len(x), 1, generator=random)  # what is left of a gradient is not small
    return DataLoader(TensorDataset(x, y), 8)


def loop_of(device: str = "cpu", kind: Any = torch.optim.Adam, **options: Any) -> hotloop.Loop:
    torch.manual_seed(0)
    model = Exploding(device)
    return hotloop.Loop(model, kind(model.parameters(), lr=1e-3), nn.MSELoss(), device=device, **options)


def train(loop: hotloop.Loop, steps: int = STEPS, loader: Any = None, times: float = 1.0) -> list[str]:
    """So many steps; after some, gradients are so many times too large. What was told."""
    told: list[str] = []
    loop._core.tuner.record.say = told.append
    for number, batch in enumerate(itertools.islice(endless(loop, loader or data()), steps)):
        if number == BEGINS:
            loop.model.times.fill_(times)  # type: ignore[operator]
        loop.step(batch)
    return told


@pytest.mark.usefixtures("in_bf16")
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"accumulate": 2}])
def test_a_norm_that_jumps_in_bf16_alone_drops_bf16(options: dict[str, Any], passes: list[bool]) -> None:
    loop = loop_of(**options)
    lines = train(loop, times=1000.0)
    assert loop.plan.precision == "fp32"
    assert loop.plan.fused, "which changes no gradient"
    trial = next(each for each in loop.tuning.trials if each.lever == "bf16")
    assert trial.verdict == "dropped"
    assert "the norm of the gradient is" in trial.why
    last = loop._core.switch.plans[-1]
    assert BEGINS < last.batch < STEPS - 5
    assert (last.plan["precision"], last.why) == ("fp32", trial.why)
    (line,) = [line for line in lines if trial.why in line]
    assert line.startswith(f"back to fp32 after {last.step} steps")
    assert not any(passes[-(STEPS - last.batch) :]), "later steps are in fp32"
    assert loop._core.tuner.passes == 6
    assert "accumulate" in options or len(passes) == STEPS + 6, "how a window is weighed takes passes of its own"
    again = loop_of(**options)
    train(again, 30)
    assert all(change.plan["precision"] == "fp32" for change in again._core.switch.plans), "remembered"


@pytest.mark.usefixtures("in_bf16")
@pytest.mark.parametrize("jump", ["gradient", "data"])
def test_a_jump_that_fp32_has_too_is_the_trainings_own(jump: str, passes: list[bool]) -> None:
    loop = loop_of()
    if jump == "gradient":
        loop.model.in_any_precision = True  # type: ignore[assignment]
        lines = train(loop, times=1000.0)
    else:
        x, y = next(iter(data()))
        lines = train(loop, loader=[(x * 100 ** (n >= BEGINS), y * 100 ** (n >= BEGINS)) for n in range(STEPS)])
    assert loop.plan.precision == "bf16"
    assert loop.plan.fused
    assert len(passes) - STEPS == loop._core.tuner.passes
    assert loop._core.tuner.passes in (6, 8), "it was looked into"
    assert not any("after" in line for line in lines)
    assert len(loop._core.switch.plans) == 2


class Late(Lever):
    """Its gradients are right at first."""

    name, order, tier, what, cost, undo = "late", 65, "B", "nothing of use", "nothing", "it is undone"
    rule = LeverRule("a test says so", lambda facts: True, "Nothing was measured")

    def __init__(self) -> None:
        self.times = torch.ones(())

    def apply(self, model: nn.Module, optimizers: Any, plan: Any) -> Any:
        hook = model.layers.register_forward_hook(lambda module, given, result: scaled(result, self.times))  # type: ignore[union-attr]
        yield hook.remove


@pytest.mark.usefixtures("in_bf16")
def test_the_next_lever_is_dropped_where_it_was_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late()
    with_lever(late, monkeypatch)
    loop = loop_of()
    for number, batch in enumerate(itertools.islice(endless(loop, data()), STEPS)):
        late.times.fill_(1000.0 if number >= BEGINS else 1.0)
        loop.step(batch)
    assert loop.plan.precision == "fp32", "of the two it is the more doubtful"
    assert "late" not in loop.plan.levers
    assert loop.plan.fused, "with both gone the gradient is that of fp32"
    assert loop._core.tuner.passes == 7


class Counting(Exploding):
    """Counts its calls where nobody could undo that."""

    calls: list[int]

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return super().forward(x)


@pytest.mark.usefixtures("in_bf16")
@pytest.mark.parametrize("why", ["plain", "asked for", "effects", "overwritten", "clipped by value", "nothing rounds"])
def test_no_norm_is_computed_where_it_could_decide_nothing(
    why: str, norms: list[Tensor], request: pytest.FixtureRequest
) -> None:
    if why == "nothing rounds":
        request.getfixturevalue("nothing_rounds")
    options: dict[str, dict[str, Any]] = {
        "plain": {"plan": "plain"},
        "asked for": {"plan": hotloop.Plan("cpu", precision="bf16")},
        "overwritten": {"kind": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True)},
        "clipped by value": {"clip_value": 1.0},
    }
    loop = loop_of(**options.get(why, {}))
    if why == "effects":
        loop.model.__class__ = Counting
        vars(loop.model)["calls"] = []
    train(loop, 40)
    assert not norms


@pytest.mark.usefixtures("in_bf16")
def test_looks_become_seldom(norms: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.tune.spikes.MOST_BETWEEN_LOOKS", 16)
    train(loop_of())
    assert len(norms) == 6, "after 4 batches, 8, 16, 32, 48, 64"


@pytest.mark.usefixtures("in_bf16")
def test_sparse_gradients_have_no_norm_and_train_on(norms: list[Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(10, 1, sparse=True)
    loop = hotloop.Loop(model, torch.optim.SparseAdam(model.parameters()), nn.MSELoss(), device="cpu")
    batches = [(torch.randint(0, 10, (8, 4)), torch.zeros(8, 1)) for _ in range(120)]
    loop.fit(batches, progress=False, monitor=False, log=tmp_path / "log.jsonl")
    assert loop.steps == 120
    assert loop.plan.precision == "bf16"
    assert not norms


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [0, 1])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_on_a_gpu_looks_wait_for_nothing(graph: int, clip: float | None) -> None:
    plan = hotloop.Plan("cuda", precision="bf16", graph=graph, clip_norm=clip)
    loop, read = loop_of("cuda", plan=plan), []
    looks = NormSpikes(loop._core.switch, 0)
    for number, batch in enumerate(loop.batches(data(100))):
        with hotloop.waits("cuda") if number > 50 else nullcontext(Waits()) as seen:
            norm = looks.now()
        assert not len(seen), str(seen)
        read += [] if norm is None else [norm]
        loop.step(batch)
    assert len(read) > 2
    assert all(0 < norm < 100 for norm in read)


@pytest.mark.gpu
@pytest.mark.usefixtures("in_bf16")
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}])
def test_on_a_gpu_several_steps_in_a_graph_are_watched(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("hotloop.tune.course.SMALL_STEP", 1e9)  # whatever else the GPU does meanwhile
    monkeypatch.setattr("hotloop.tune.course.HOST_LIMITS", 0.0)
    loop = loop_of("cuda", **options)

    def explode(record: Any) -> None:
        if record.epoch.number == 20:
            assert loop.plan.precision == "bf16"
            loop.model.times.fill_(1000.0)  # type: ignore[operator]

    # An evaluation after each epoch, so that the host is not many epochs ahead of the device.
    report = loop.fit(data(64), epochs=60, on_epoch=explode, validate=data(1), progress=False, monitor=False)
    assert max(change.plan["graph"] for change in report.plans) > 1
    assert loop.plan.precision == "fp32"
    assert loop.plan.fused
    assert any("the norm of the gradient is" in change.why for change in report.plans)
