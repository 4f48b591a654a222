"""A run that says nothing gets the plan that the rules propose, tried on its own steps, and nothing else changes."""

import copy
import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hotloop
from hotloop.errors import LossNotFinite, PlanWarning
from hotloop.levers import LEVERS, Lever, in_words
from hotloop.levers.base import LeverRule, LeverTarget, RunFacts
from hotloop.plan import Plan
from hotloop.tune.course import Course
from hotloop.tune.knowledge import expected_start
from hotloop.values.reach import look

from ..thorough import tries
from .runs import LONG, endless, with_lever

STEPS = 40


class Counted(nn.Module):
    """A small network whose forward passes `counted` counts."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The items in each call of such networks, counted where no look at the state of a step comes by."""
    calls: list[int] = []

    def count(module: nn.Module, given: tuple[Tensor]) -> None:
        if type(module) is Counted:
            calls.append(len(given[0]))

    hook = register_module_forward_pre_hook(count)
    yield calls
    hook.remove()


def data(rows: int = 512, batch: int = 8) -> DataLoader[Any]:
    x = torch.linspace(0, 1, rows * 8).view(rows, 8)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch, shuffle=True)


def loop_of(model: nn.Module, **options: Any) -> hotloop.Loop:
    return hotloop.Loop(model, torch.optim.Adam(model.parameters()), nn.MSELoss(), device="cpu", **options)


def train(loop: hotloop.Loop, loader: Any, steps: int = STEPS) -> list[float]:
    """A loop of one's own that is expected to go on for long."""
    return [float(loop.step(batch)) for batch in itertools.islice(endless(loop, loader), steps)]


@pytest.mark.parametrize(
    "settings", [{}, {"micro_batch": 3}, {"workers": 0}, {"split": "items"}, {"clip_norm": 1.0}], ids=str
)
def test_a_plan_is_in_force_after_a_few_steps_and_says_why(settings: dict[str, Any]) -> None:
    """What a person decides stays, and leaves the rest to the tuner."""
    torch.manual_seed(0)
    loop = loop_of(Counted(), **settings)
    with counted() as calls:
        train(loop, data(), 150)  # after which it has been timed, more than once on a busy machine
    assert loop._core.switch.plans[1].step <= 8
    assert loop.tuning.step
    trials = {trial.lever: trial for trial in loop.tuning.trials}
    assert set(trials) == {lever.name for lever in LEVERS}
    assert all(trial.why for trial in trials.values())
    assert trials["fused"].verdict in ("kept", "dropped")
    for name, value in settings.items():
        assert getattr(loop.plan, name) == value
    assert max(calls[-STEPS:]) == settings.get("micro_batch", 8)


def test_workers_are_in_the_line_where_there_are_any() -> None:
    assert in_words(Plan(workers=1)) == ["1 worker"]
    assert in_words(Plan("cpu", workers=2, stream="resident")) == ["batches gathered from one tensor"]


def test_single_steps_give_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """On a busy machine, eight runs of one script told gains between 1.0 and 15.9."""
    torch.manual_seed(0)
    loop = loop_of(Counted())
    report = loop.fit(data(), epochs=4, progress=True)
    (told,) = (line for line in capsys.readouterr().err.splitlines() if 'plan="plain"' in line)
    assert "fused optimizer" in told
    assert "×" not in told
    assert loop.tuning.gain is None
    assert not any(trial.gain for trial in loop.tuning.trials)
    assert "times the plain loop" not in f"{loop.tuning}{report}"


def _end_after(epochs: int, record: Any) -> str | None:
    return "stop" if record.epoch.number == epochs else None


class Queue(nn.Module):
    """Keeps what it has seen, as contrastive learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.mean()))
        return self.layer(x)


def test_no_pass_is_repeated_where_a_step_has_effects_that_nobody_could_undo(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    model = Queue()
    loop = loop_of(model)
    report = loop.fit(data(), epochs=LONG, progress=True, on_epoch=partial(_end_after, 3))
    assert len(model.seen) == report.steps
    assert "model.seen" in capsys.readouterr().err
    assert loop.plan.precision == "fp32"
    assert not loop.plan.fused, "it rounds"


@pytest.mark.usefixtures("nothing_rounds")
def test_training_goes_on_as_without_it_where_nothing_rounds() -> None:
    """Dropout draws as before, and a random transform of batches is called once for each."""
    losses = []
    for plan in ("plain", "auto"):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)

        def noisy(batch: Any, generator: torch.Generator = generator) -> Any:
            return batch[0] + torch.randn(batch[0].shape, generator=generator) + torch.randn(()), batch[1]

        loop = loop_of(Counted(dropout=0.3), plan=plan)
        loop._core.data.expected = LONG
        batches = loop.batches(data(), device_transform=noisy)
        losses.append([float(loop.step(batch)) for batch in itertools.islice(batches, STEPS)])
    assert losses[0] == losses[1]


class Wrong(Lever):
    """Changes what the model computes, in the name of rounding."""

    name, order, tier, what, cost, undo = "wrong", 65, "B", "nothing of use", "nothing", "it is undone"
    rule = LeverRule("a test says so", lambda facts: True, "Nothing was measured")
    factor = 3.0

    def apply(self, model: nn.Module, optimizers: Any, plan: Plan) -> Any:
        handle = model.layers.register_forward_hook(lambda module, given, result: result * self.factor)  # type: ignore[union-attr]
        yield handle.remove


class Failing(Wrong):
    name = "failing"

    def apply(self, model: nn.Module, optimizers: Any, plan: Plan) -> Any:
        def fail(module: object, given: object) -> None:
            raise RuntimeError("not in this precision")

        yield model.layers.register_forward_pre_hook(fail).remove  # type: ignore[union-attr]


class Scrambling(Wrong):
    """Other code for the same numbers, so it says, with one small gradient in another order."""

    name, computes_the_same = "scrambling", True

    def apply(self, model: nn.Module, optimizers: Any, plan: Plan) -> Any:
        yield model.layers[0].bias.register_hook(lambda gradient: gradient.flip(0)).remove  # type: ignore[union-attr, operator]


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Sluggish(Wrong):
    name = "sluggish"

    def apply(self, model: nn.Module, optimizers: Any, plan: Plan) -> Any:
        yield model.layers.register_forward_pre_hook(lambda module, given: busy(0.01)).remove  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("lever", "says", "steps"),
    [
        (Wrong, "gradient", STEPS),
        (Scrambling, "the gradient of layers.0.bias is", STEPS),
        (Failing, "not in this precision", STEPS),
        (Sluggish, "times as long", 150),  # it is timed again and again: other programs may have disturbed it
    ],
)
def test_a_lever_that_does_not_work_here_is_left_out_and_remembered(
    lever: type[Lever], says: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for one that was only slower: other programs may have been why, and the next run tries it again."""
    with_lever(lever(), monkeypatch)
    for life in range(2):
        torch.manual_seed(0)
        loop = loop_of(Counted())
        train(loop, data(), steps)
        (trial,) = [trial for trial in loop.tuning.trials if trial.lever == lever.name]
        assert trial.verdict == "dropped"
        assert says in trial.why
        assert lever.name not in loop.plan.levers
        tried = any(lever.name in change.plan["levers"] for change in loop._core.switch.plans)
        assert tried == (life == 0 or lever is Sluggish), "remembered"
        assert not loop.model.layers._forward_hooks


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Wrong:
    """A lever that is right at first."""
    lever = Wrong()
    lever.factor = 1.0
    monkeypatch.setattr("hotloop.tune.course.SURELY_SLOWER", 100.0)  # whatever else this machine does
    with_lever(lever, monkeypatch)
    return lever


def test_a_lever_that_diverges_later_is_dropped(late: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.tune.rounding.AUDITS", (40, 1000))
    torch.manual_seed(0)
    loop = loop_of(Counted())
    for number, batch in enumerate(itertools.islice(endless(loop, data()), 60)):
        if number == 30:
            assert "wrong" in loop.plan.levers
            late.factor = -1.0
        loop.step(batch)
    assert "wrong" not in loop.plan.levers
    assert next(t for t in loop.tuning.trials if t.lever == "wrong").verdict == "dropped"


class Normed(nn.Module):
    """A network with running statistics and dropout, which a batch that is repeated must not count twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def steps_of(loop: hotloop.Loop, loader: Any, steps: int, before: dict[int, Any]) -> tuple[list[float], list[str]]:
    """Losses and what was told; `before` some steps, something is done."""
    told: list[str] = []
    loop._core.tuner.record.say = told.append
    losses = []
    for number, batch in enumerate(itertools.islice(endless(loop, loader), steps)):
        before.get(number, lambda: None)()
        losses.append(float(loop.step(batch)))
    return losses, told


@pytest.mark.filterwarnings("ignore:batch normalisation:hotloop.errors.PlanWarning")
@pytest.mark.parametrize(("accumulate", "broken"), [(1, 41), (2, 40), (2, 41)])
def test_a_loss_that_is_lost_by_rounding_alone_is_computed_again_in_fp32(
    accumulate: int, broken: int, late: Wrong
) -> None:
    found = []
    for plan in ("plain", "auto"):
        torch.manual_seed(0)
        late.factor = 1.0
        model = Normed()
        loop = loop_of(model, plan=plan, accumulate=accumulate)
        spoil = {broken: lambda: setattr(late, "factor", float("inf"))} if plan == "auto" else {}
        losses, told = steps_of(loop, data(), 60, spoil)
        found.append(losses)
        assert int(model.layers[1].num_batches_tracked) == 60
        assert loop._core.watch.batches == 60
        assert loop.steps == 60 // accumulate
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert "wrong" in [change.plan["levers"] for change in loop._core.switch.plans][-2]
    assert "wrong" not in loop.plan.levers
    assert loop.plan.fused, "which computes no loss"
    (line,) = [line for line in told if "back to fp32" in line]
    assert "the loss is not finite with it, and is in fp32" in line
    torch.manual_seed(0)
    again = loop_of(Normed(), accumulate=accumulate)
    steps_of(again, data(), 20, {})
    assert not any("wrong" in change.plan["levers"] for change in again._core.switch.plans), "remembered"


@pytest.mark.parametrize("rounds", [False, True])
def test_few_forward_passes_beyond_one_a_step(rounds: bool, late: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fused optimizer the gate is not asked: only the facts of one pass are needed."""
    monkeypatch.setattr("hotloop.tune.rounding.AUDITS", (20, 60))
    if not rounds:
        monkeypatch.setattr(late, "rule", None)
    torch.manual_seed(0)
    loop = loop_of(Counted(dropout=0.2))
    with counted() as calls:
        train(loop, data(), 100)
    assert loop.plan.levers == (("wrong",) if rounds else ())
    assert loop.plan.fused
    assert len(calls) - 100 == loop._core.tuner.passes == (6 if rounds else 1)


def test_a_loss_that_is_lost_in_fp32_too_is_an_error(late: Wrong) -> None:
    torch.manual_seed(0)
    loop = loop_of(Counted())
    broken = {40: lambda: loop.model.layers.register_forward_hook(lambda *given: given[-1] * float("nan"))}  # type: ignore[union-attr]
    with pytest.raises(LossNotFinite, match=r"step 41 (.|\n)*still those of the step before"):
        steps_of(loop, data(), 60, broken)
    assert all(p.isfinite().all() for p in loop.model.parameters())
    torch.manual_seed(0)
    again = loop_of(Counted())
    steps_of(again, data(), 20, {})
    assert "wrong" in again.plan.levers, "it was not the fault of rounding"
    asked = loop_of(loop.model, plan=Plan("cpu", fused=True))
    with pytest.raises(LossNotFinite):
        train(asked, data())
    assert asked.plan.fused, "what a person asks for is not taken back"


@pytest.mark.parametrize("resumed", [False, True])
def test_losses_that_jump_by_rounding_drop_the_lever(resumed: bool, late: Wrong) -> None:
    torch.manual_seed(0)
    loop = loop_of(Counted())
    steps_of(loop, data(), 40, {})
    assert "wrong" in loop.plan.levers
    if resumed:
        state = loop.state_dict()
        loop = loop_of(Counted())
        loop.load_state_dict(state)
        assert "wrong" in loop.plan.levers
    losses, told = steps_of(loop, data(), 60, {40: lambda: setattr(late, "factor", 100.0)})
    assert "wrong" not in loop.plan.levers
    assert max(losses[44:]) < 0.1 * losses[40], "after three losses in a row"
    (line,) = [line for line in told if "back to fp32" in line]
    assert "times its median, and the gradient" in line
    assert loop._core.tuner.passes <= 6
    late.factor = 1.0
    torch.manual_seed(0)
    again = loop_of(Counted())
    steps_of(again, data(), 40, {})
    assert "wrong" not in again.plan.levers, "remembered"


def test_losses_that_jump_in_fp32_too_change_nothing(late: Wrong) -> None:
    torch.manual_seed(0)
    loop = loop_of(Counted())
    x = torch.linspace(0, 1, 8 * 8).view(8, 8)
    hard = [(x, x.sum(1, keepdim=True) * (1 if number < 60 else 10.0 ** (2 + number // 40))) for number in range(300)]
    loop._core.data.expected = LONG
    for batch in loop.batches(hard):
        loop.step(batch)
    assert "wrong" in loop.plan.levers
    assert 2 < loop._core.tuner.passes <= 10, "eight, and two for a sign"


class Rows(IterableDataset[Any]):
    """A stream that has no length."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(400):
            x = torch.full((8,), number / 400)
            yield x, x.sum(0, keepdim=True)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_objectives_get_a_plan_between_two_windows(accumulate: int) -> None:
    model = nn.ModuleDict({"a": Counted(), "b": Counted()})
    optimizers = {name: torch.optim.Adam(part.parameters()) for name, part in model.items()}
    objectives = {
        name: lambda model, batch, name=name: nn.functional.mse_loss(model[name](batch[0]), batch[1]) for name in model
    }
    loop = hotloop.Loop(model, optimizers, objective=objectives, device="cpu", accumulate=accumulate)
    train(loop, data())
    assert loop.tuning is not None
    assert all(change.batch % accumulate == 0 for change in loop._core.switch.plans)


def test_a_loader_without_a_length_and_epochs_of_two_batches_get_a_plan() -> None:
    for loader, epochs in ((DataLoader(Rows(), 8), 1), (data(16), LONG)):
        loop = loop_of(Counted())
        loop.fit(loader, epochs=epochs, on_epoch=partial(_end_after, 60), progress=False, validate=data(16))
        assert loop.tuning is not None


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
    "mkldnn": Tensor.to_mkldnn,
    "nested": lambda x: torch.nested.nested_tensor([x[:3], x[3:]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:.*(beta|prototype).*:UserWarning")  # of PyTorch's layouts
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_of_every_layout_are_trained_on(layout: str) -> None:
    """Sparse CSR batches ended a training at step 6: they have no strides."""

    def objective(model: nn.Module, batch: Tensor) -> Tensor:
        if layout in ("nested", "jagged"):
            batch = torch.cat([*batch.unbind()])
        return model(batch.to_dense() if layout not in ("nested", "jagged") else batch).square().mean()

    weights = []
    for plan in ("plain", "auto"):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        batches = [LAYOUTS[layout](torch.randn(6, 4) * (torch.rand(6, 4) > 0.5)) for _ in range(8)]
        optimizer = torch.optim.Adam(model.parameters())
        loop = hotloop.Loop(model, optimizer, objective=objective, device="cpu", plan=plan)
        train(loop, batches)
        assert loop.steps == STEPS
        weights.append(model.weight.detach())
    assert torch.allclose(*weights, rtol=1e-4, atol=1e-5)


class Speechless:
    """A part of a batch that has no words."""

    __slots__ = ()

    def __repr__(self) -> str:
        raise RuntimeError("there is nothing to say")


def test_an_error_of_the_tuner_ends_no_training() -> None:
    """What it tried is dropped, and it says so."""
    weights = []
    for plan in ("plain", "auto"):
        torch.manual_seed(0)
        model = Counted()
        batches = [(torch.randn(4, 8), torch.randn(4, 1), Speechless()) for _ in range(130)]

        def objective(net: nn.Module, batch: Any) -> Tensor:
            return nn.functional.mse_loss(net(batch[0]), batch[1])

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loop = hotloop.Loop(model, optimizer, objective=objective, device="cpu", plan=plan)
        told = pytest.warns(PlanWarning, match="tuning has failed .*nothing to say.*the run goes on as you wrote it")
        with told if plan == "auto" else nullcontext():
            assert loop.fit(batches, progress=False).steps == 130
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.allclose, *weights))
    assert loop.plan == Plan("cpu", stream=loop.plan.stream), "as it was written"
    assert all("nothing to say" in trial.why for trial in loop.tuning.trials)


def facts(**known: Any) -> RunFacts:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    given = {"flops": 1e12, "step": 5e-3, **known}
    return RunFacts(LeverTarget(torch.device("cpu"), model, [optimizer]), **given)


def test_the_rules_know_when() -> None:
    rules = {lever.name: lever.rule for lever in LEVERS if lever.rule is not None}
    assert rules["bf16"].holds(facts())
    assert not rules["bf16"].holds(facts(flops=1e7))
    assert rules["bf16"].holds(facts(is_launched=True))
    assert rules["bf16"].holds(facts(flops=7e9))
    assert not rules["bf16"].holds(facts(flops=7e9, is_launched=True))
    assert rules["graph"].holds(facts())
    assert not rules["graph"].holds(facts(has_room=False))
    assert not rules["graph"].holds(facts(step=1.0))
    assert not rules["graph"].holds(facts(shapes_vary=True, step=0.1, left=20.0))
    assert rules["graph"].holds(facts(shapes_vary=True, step=0.1, left=40.0))
    assert rules["graph"].holds(facts(shapes_vary=True, left=None))
    assert rules["no cudnn attention"].holds(facts(attends=True, shapes_vary=True))
    assert not rules["no cudnn attention"].holds(facts(attends=True, left=1e6))
    assert rules["row kernels"].holds(facts(row_sums=9))
    assert not rules["row kernels"].holds(facts(row_sums=9, shapes_vary=True))
    assert not rules["row kernels"].holds(facts(row_sums=1))
    assert all(rule.when and rule.evidence for rule in rules.values())


def test_channels_last_waits_for_no_depthwise_convolution_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    lever = next(lever for lever in LEVERS if lever.name == "channels last")
    convolution = nn.Conv2d(16, 32, 3)
    network = {
        "plain": nn.Sequential(convolution),
        "known": nn.Sequential(convolution, nn.Conv2d(32, 32, 3, groups=32)),
        "unknown": nn.Sequential(convolution, nn.Conv2d(32, 32, 9, groups=32)),
    }

    def proposed(name: str, left: float | None, precision: str = "bf16") -> bool:
        target = LeverTarget(torch.device("cuda"), network[name], [])
        known = RunFacts(target, flops=1e12, step=0.1, left=left)
        return lever.obstacle(target, Plan("cuda", precision=precision)) is None and lever.rule.holds(known)

    monkeypatch.setattr("hotloop.kernels.nvrtc.why_no_kernels", lambda device: None)
    assert all(proposed(name, left=None) for name in network)
    assert proposed("known", left=10.0), "by hotloop's kernels"
    assert not proposed("unknown", left=10.0)
    assert proposed("unknown", left=100.0)
    assert proposed("plain", left=10.0, precision="fp32")
    assert not proposed("known", left=100.0, precision="fp32"), "hotloop's are for two bytes"
    monkeypatch.setattr("hotloop.kernels.nvrtc.why_no_kernels", lambda device: "the GPU is too old")
    assert not proposed("known", left=10.0)


def test_a_plan_for_many_convolutions_takes_longer_to_begin() -> None:
    small = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    deep = nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(50)))
    expected = [expected_start(LeverTarget(torch.device("cuda"), model, [])) for model in (small, deep[:5], deep)]
    assert expected[0] == pytest.approx(0.104)
    assert expected[1] == pytest.approx(0.575)
    assert expected[2] == pytest.approx(1.25)


def test_what_a_lever_puts_onto_a_module_is_not_taken_for_the_persons() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), nn.MSELoss(), device="cpu")
    before = look({"model": model})
    loop._core.switch.carry_out(Plan("cpu", compile="blocks"), "a test")
    assert "forward" in vars(model[0])
    assert not before.changes(look({"model": model}))


def test_on_a_cpu_a_run_of_the_default_can_be_repeated_to_the_bit_beside_other_programs() -> None:
    """No clock decides what rounds; at times other programs take most of the machine."""
    images = torch.rand(1200, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    weights: list[list[Tensor]] = []
    plans: list[Any] = []
    for life in range(tries(2, 4)):
        burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (life % 2))]
        try:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.LazyLinear(10))
            model(images[:1])
            optimizer = torch.optim.Adam(model.parameters())
            loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu")
            labels = torch.arange(len(images)) % 10
            report = loop.fit(DataLoader(TensorDataset(images, labels), 8, shuffle=True), progress=False)
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
        assert len(report.plans) > 1, "a plan was adopted"
        weights.append(list(model.parameters()))
        plans.append([(change.batch, change.plan, change.why) for change in report.plans])
    for life, other in enumerate(weights):
        apart = max(float((a - b).detach().abs().max()) for a, b in zip(weights[0], other, strict=True))
        assert apart == 0, f"run {life}: {apart}\n{plans[0]}\n{plans[life]}"


class Ragged(IterableDataset[Any]):
    """Batches of sequences that are padded to the longest of each."""

    def __iter__(self) -> Iterator[Any]:
        numbers = torch.Generator().manual_seed(0)
        for length in itertools.cycle((9, 17, 12, 24, 15)):
            x = torch.rand(4, length, 8, generator=numbers)
            yield x, x.sum(2, keepdim=True)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_a_long_run_of_ragged_batches_is_compiled_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.tune.course.HELD_UP", 1.0)
    monkeypatch.setattr("hotloop.tune.course.FASTER", 1e-9)  # kept however fast it is
    torch.compiler.reset()
    dynamo = pytest.importorskip("torch._dynamo.utils").counters
    dynamo.clear()
    torch.manual_seed(0)
    loop = loop_of(Counted())
    loop._core.data.expected = 10**9
    after = 0
    for steps, batch in enumerate(loop.batches(DataLoader(Ragged(), batch_size=None))):
        loop.step(batch)
        after += loop.plan.compile != "off"
        if after > 60 or steps > 200_000:
            break
    with torch.profiler.profile() as profile:
        for batch in itertools.islice(loop.batches(DataLoader(Ragged(), batch_size=None)), 5):
            loop.step(batch)
    regions = [event.name for event in profile.events() if event.name.startswith("Torch-Compiled Region")]
    assert len(regions) == 5, "all lengths run as compiled"
    found = next(trial for trial in loop.tuning.trials if trial.lever == "compile")
    assert (found.verdict, loop.plan.compile) == ("kept", "default"), found.why
    assert dynamo["stats"]["unique_graphs"] == 1


def test_a_compiler_that_fails_is_told_and_the_run_goes_on_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no compiler today")

    monkeypatch.setattr("hotloop.tune.course.HELD_UP", 1.0)
    monkeypatch.setattr("hotloop._torch.Inductor.__call__", fails)
    torch.compiler.reset()
    runs = []
    for plan in ("auto", "plain"):
        torch.manual_seed(0)
        model = Counted()
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.01), nn.MSELoss(), device="cpu", plan=plan)
        runs.append([loop.step(batch).item() for batch in itertools.islice(endless(loop, data(), 10**9), 300)])
        if plan == "auto":
            (trial,) = (trial for trial in loop.tuning.trials if trial.lever == "compile")
            assert trial.verdict == "dropped"
            assert "no compiler today" in trial.why
            assert loop.plan.compile == "off"
    assert runs[0] == pytest.approx(runs[1], rel=1e-4), "as if nothing had been tried"


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_what_was_compiled_for_nothing_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.tune.course.HELD_UP", 1.0)
    monkeypatch.setattr("hotloop.tune.course.FASTER", 1e9)  # nothing is fast enough
    torch.compiler.reset()
    torch.manual_seed(0)
    loop = loop_of(Counted())
    for steps, batch in enumerate(endless(loop, data(), 10**9)):
        loop.step(batch)
        known = {} if loop.tuning is None else {trial.lever: trial for trial in loop.tuning.trials}
        if steps > 100 and "took" in getattr(known.get("compile"), "why", ""):
            break
        assert steps < 200_000, known.get("compile")
    assert loop.plan.compile == loop.tuning.plan.compile == "off"
    assert "as long" in known["compile"].why


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("allowed", [True, False])
def test_a_network_that_turns_any_rounding_into_another_gradient_is_trained_in_bf16(
    device: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.levers.bf16.has_amx", lambda: True)
    monkeypatch.setattr("hotloop.levers.base.HEAVY", 0.0)
    monkeypatch.setattr("hotloop.tune.course.SLOWER", 100.0)  # whatever else this machine does
    monkeypatch.setattr("hotloop.tune.course.SURELY_SLOWER", 100.0)
    if not allowed:
        monkeypatch.setattr("hotloop.tune.gate.SHAKEN", 0.0)
    torch.manual_seed(0)
    blocks = [each for _ in range(20) for each in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    before = [p.detach().clone() for p in model.parameters()]
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.0), nn.CrossEntropyLoss(), device=device)
    noise = TensorDataset(torch.randn(256, 8, 4, 4), torch.randint(0, 4, (256,)))
    for batch in itertools.islice(endless(loop, DataLoader(noise, 64, shuffle=True)), 12):
        loop.step(batch)
    assert loop.plan.precision == ("bf16" if allowed else "fp32")
    assert loop.plan.channels_last, "what was not refused stays"
    for parameter, weights in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.cpu(), weights), "it has all its digits again"


class LanguageModel(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.layers = nn.LSTM(64, 64, 2, batch_first=True, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(x))[0]).transpose(1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_recurrent_language_model_keeps_its_graph(dropout: float) -> None:
    """cuDNN waits in its first call with a new dropout state, as after the gate: that is no part of a step."""
    torch.manual_seed(0)
    rows = torch.randint(100, (4096, 33))
    model = LanguageModel(dropout)
    optimizer = torch.optim.Adam(model.parameters())
    loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device="cuda", clip_norm=1.0)
    loop.fit(DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), 16), epochs=6, progress=False)
    assert loop.plan.graph, loop.tuning


@pytest.mark.gpu
def test_tiny_steps_go_into_one_graph_at_once() -> None:
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(1024, 16), torch.randn(1024, 1))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), nn.MSELoss(), device="cuda")
    report = loop.fit(DataLoader(rows, 64, shuffle=True), epochs=400, progress=False)
    assert [change.plan["graph"] for change in report.plans][:2] == [0, 16]
    assert report.plans[1].step < 20
    assert report.steps == 16 * 400
    trial = next(each for each in loop.tuning.trials if each.lever == "several steps")
    assert (trial.verdict, loop.plan.graph) == ("kept", 16), trial.why


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batches", "first", "others", "prepares"),
    [
        (10, 1.0, 0.0, False),  # seconds: in the first step, libraries may load
        (2000, 1.0, 0.0, True),
        (12, 0.04, 0.04, False),  # 0.3 s are worth a plan, which begins after 7 steps
        (24, 0.04, 0.04, True),
    ],
)
def test_a_plan_is_prepared_where_the_steps_that_follow_pay_for_it(
    batches: int, first: float, others: float, prepares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[bool] = []
    monkeypatch.setattr(Course, "_prepare", lambda course: prepared.append(True))
    torch.manual_seed(0)
    model, pauses = nn.Linear(8, 1), itertools.chain([first], itertools.repeat(others))

    def objective(model: nn.Module, batch: list[Tensor]) -> Tensor:
        time.sleep(next(pauses))
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), objective=objective, device="cuda")
    loop.fit(DataLoader(TensorDataset(torch.randn(batches, 8), torch.randn(batches, 1)), 1), progress=False)
    assert prepared == [True] * prepares


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [False, True], ids=["restorable", "with side effects"])
def test_a_run_on_a_gpu_has_the_fused_optimizer_from_its_first_step(changes: bool) -> None:
    torch.manual_seed(0)
    model, seen = nn.Linear(8, 1), []

    def objective(model: nn.Module, batch: list[Tensor]) -> Tensor:
        if changes:
            seen.append(len(batch))
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    optimizer = torch.optim.Adam(model.parameters())
    loop = hotloop.Loop(model, optimizer, objective=objective, device="cuda")
    data = DataLoader(TensorDataset(torch.randn(4000, 8), torch.randn(4000, 1)), 4)
    report = loop.fit(data, epochs=20, progress=False)
    assert [change.plan["fused"] for change in report.plans] == [True] * len(report.plans)
    assert report.plans[0].step == 0
    found = next(trial for trial in loop.tuning.trials if trial.lever == "fused")
    assert (found.verdict, found.why) == ("kept", "the optimizer has a fused kernel")
    assert optimizer.state_dict()["param_groups"][0]["fused"] is None, "what a person saves is theirs"


OPTIMIZERS = [
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "LBFGS")  # which want sparse gradients, or a closure
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_by_default(name: str, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    models = [nn.Linear(8, 1, bias=name != "Muon")]  # which is for matrices alone
    models.append(copy.deepcopy(models[0]))
    loops = [
        hotloop.Loop(m, getattr(torch.optim, name)(m.parameters(), 0.01), nn.MSELoss(), device=device, plan=plan)
        for m, plan in zip(models, ("auto", "plain"), strict=True)
    ]
    loader, epochs = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4), 1 if device == "cpu" else 4
    losses = [loop.fit(loader, epochs=epochs, progress=False).epochs[-1].loss for loop in loops]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2, abs=1e-5)
    assert losses[0] < 50
