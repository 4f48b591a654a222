"""Resume is exact: a run that was stopped again and again ends as one that never was, to the bit."""

import copy
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hotloop import Loop, Plan, Report
from hotloop.checkpoint.codec import pack
from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.errors import BadArgument, HotloopError
from hotloop.run.display import Display

from ..thorough import THOROUGH, tries
from .conftest import at_step, signalled

pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation")  # in batches that are accumulated
ITEMS, BATCH = 45, 6  # eight batches, the last with three items


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return output.argmax(1) == target


def points() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ITEMS, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


@dataclass
class Script:
    """What a person's script builds before it calls `fit`: the same each time that it is started."""

    loop: Loop
    loader: Iterable[Any]
    more: dict[str, Any] = field(default_factory=dict)  # for fit


def network(*, norm: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(8, 3))


def shuffled(*, own: bool = True, dataset: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3) if own else None
    return DataLoader(dataset or TensorDataset(*points()), BATCH, shuffle=True, generator=generator, **options)


def held_out() -> dict[str, Any]:
    return {"validate": DataLoader(TensorDataset(*points()), 16), "metrics": {"accuracy": accuracy}}


def script(
    scheduler: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    loader: Callable[[], Iterable[Any]] = shuffled,
    *,
    model: Callable[[], nn.Module] = network,
    **options: Any,
) -> Script:
    made = model()
    steps = optimizer(made.parameters(), lr=0.02)
    goal = {"loss": nn.CrossEntropyLoss()} if "objective" not in options else {}
    loop = Loop(made, steps, device="cpu", plan="plain", scheduler=scheduler(steps), **goal, **options)
    return Script(loop, loader(), held_out())


def momentum(parameters: Any, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


def per_epoch() -> Script:
    return script(lambda o: StepLR(o, 1, 0.5), schedule="epoch")


def plateau() -> Script:
    return script(lambda o: ReduceLROnPlateau(o, patience=0, threshold=0.5, factor=0.3))


def plateau_without_evaluation() -> Script:
    return replace(script(lambda o: ReduceLROnPlateau(o, patience=0, threshold=0.5), accumulate=3), more={})


def schedules_in_a_row() -> Script:
    return script(
        lambda o: SequentialLR(o, [LambdaLR(o, lambda n: (n + 1) / 6), OneCycleLR(o, 0.03, total_steps=30)], [5])
    )


def accumulated() -> Script:
    return script(accumulate=3, clip_norm=0.3)


def half_precision() -> Script:
    made = script(precision="fp16", clip_norm=1.0)
    state = made.loop._core.switch.step.state.state_dict()
    for scaler in state["scalers"].values():
        scaler.update(growth_interval=3, scale=2.0**20)  # it moves within the run
    made.loop._core.switch.step.state.load_state_dict(state)
    return made


def global_order() -> Script:
    return script(loader=lambda: shuffled(own=False))


class Moving(nn.Module):
    """Holds what a state_dict leaves out: a buffer that is not saved, a counter, a tensor, what learns from when on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("mean", torch.zeros(6), persistent=False)
        self.calls = 0
        self.phase = "early"
        self.temperature = torch.ones(())
        self.inner[0].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.mean(0), 0.1)
            self.temperature = self.temperature * 0.99
            if self.calls == 7:
                self.phase = "late"
                self.inner[0].weight.requires_grad_(True)
        return self.inner(x - self.mean) / self.temperature + 0.01 * self.calls


def moving() -> Script:
    return script(model=Moving)


class Goal(nn.Module):
    """An objective that is a module with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
        self.register_buffer("average", torch.zeros(()))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]) + self.bias, batch[1])
        self.average.lerp_(loss.detach(), 0.1)
        return loss + 0.1 * self.average


def weights_outside_the_model() -> Script:
    """Of the objective, and of no module at all."""
    model, goal, sharpness = network(), Goal(), nn.Parameter(torch.ones(()))
    model[-1].register_forward_hook(lambda module, given, output: output * sharpness)
    optimizer = torch.optim.Adam([*model.parameters(), *goal.parameters(), sharpness], 0.01)
    return Script(Loop(model, optimizer, objective=goal, device="cpu", plan="plain"), shuffled())


def resident() -> Script:
    model = network()
    plan = Plan("cpu", stream="resident", accumulate=2)
    loop = Loop(model, torch.optim.AdamW(model.parameters(), 0.02), nn.CrossEntropyLoss(), device="cpu", plan=plan)
    return Script(loop, shuffled(), held_out())


def shuffled_evaluation() -> Script:
    made = script(lambda o: ReduceLROnPlateau(o, patience=0, threshold=0.5))
    return replace(made, more={**held_out(), "validate": shuffled()})


def trained_before() -> Script:
    """A script that has a loop of its own first, and a fit that is not saved."""
    made = script(lambda o: StepLR(o, 5, 0.9))
    for batch in made.loop.batches(made.loader):
        made.loop.step(batch)
    made.loop.fit(made.loader, progress=False)
    return made


SCRIPTS = [  # others are killed in the zoo
    *(trained_before, plateau_without_evaluation, schedules_in_a_row, half_precision),
    *(global_order, weights_outside_the_model, shuffled_evaluation),
]


@dataclass
class Ended:
    """How a run ended, as data that can be compared."""

    report: Report
    state: Any
    tensors: dict[str, Tensor]
    lives: int


def ended(made: Script, report: Report, lives: int = 1) -> Ended:
    tensors, state = pack(made.loop.state_dict())
    return Ended(report, state, {name: tensor.clone() for name, tensor in tensors.items()}, lives)


def started(build: Callable[[], Script], life: int = 1) -> Script:
    """The script, begun once more; what else it has drawn in each of its lives is of no importance."""
    made = build()
    torch.manual_seed(life)
    np.random.seed(life)
    random.seed(life)
    return made


def unbroken(build: Callable[[], Script], epochs: int = 3) -> Ended:
    """The run that was never stopped, and never saved."""
    made = started(build)
    return ended(made, made.loop.fit(made.loader, epochs=epochs, progress=False, **made.more))


def broken(
    build: Callable[[], Script], stops: Iterable[int], epochs: int = 3, signum: int = signal.SIGTERM, **more: Any
) -> Ended:
    """The same run, stopped after so many steps of each of its lives; each life is begun as a new process would."""
    left = iter(stops)
    with tempfile.TemporaryDirectory() as folder:
        for life in range(1, 200):
            made = started(build, life)
            if (stop := next(left, None)) is not None:
                at_step(made.loop, stop, signalled(signum))
            options = {"save": folder, "every": "1h", "resume": True, "progress": False} | more
            report = made.loop.fit(made.loader, epochs=epochs, **options, **made.more)
            if not report.interrupted:
                assert report.resumed == life - 1
                return ended(made, report, life)
    raise AssertionError("it does not come to its end")


def same(one: Ended, other: Ended) -> None:
    """Weights, buffers, optimizers, schedules, scalers, losses, the curve and all rng states."""
    assert one.state == other.state
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.equal(tensor, other.tensors[name]), name
    for report in (one.report, other.report):
        assert all(epoch.seconds > 0 for epoch in report.epochs)
    reports = [
        replace(each.report, epochs=tuple(replace(e, seconds=0.0) for e in each.report.epochs)) for each in (one, other)
    ]
    for name in ("steps", "skipped", "epochs", "curve", "precision", "stopped", "interrupted"):
        assert getattr(reports[0], name) == getattr(reports[1], name), name


def assert_resumed_alike(build: Callable[[], Script], stops: list[int], epochs: int) -> None:
    """A run that is stopped after so many steps of each of its lives ends as one that was not, to the bit."""
    stopped = broken(build, stops, epochs)
    assert stopped.lives > 1
    same(unbroken(build, epochs), stopped)


@pytest.mark.parametrize("build", SCRIPTS, ids=[build.__name__ for build in SCRIPTS])
def test_a_run_that_is_stopped_ends_as_one_that_was_not(build: Callable[[], Script]) -> None:
    epochs, stops = tries(2, 3), [10]  # in the second epoch, when everything has moved
    if THOROUGH:
        stops = [1, 6, 9, 3]
    whole = unbroken(build, epochs)
    stopped = broken(build, stops, epochs)
    assert stopped.lives >= max(2, len(stops)), "windows of accumulation are completed first"
    same(whole, stopped)


@settings(max_examples=tries(2, 12), deadline=None)
@given(
    build=st.sampled_from([accumulated, plateau, resident, moving]),
    stops=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    signum=st.sampled_from([signal.SIGTERM, signal.SIGINT]),
)
@example(build=accumulated, stops=[1, 6, 12], signum=signal.SIGTERM)  # only the last evaluation is left
def test_wherever_it_is_stopped(build: Callable[[], Script], stops: list[int], signum: int) -> None:
    same(unbroken(build), broken(build, stops, signum=signum))


def test_checkpoints_in_the_middle_and_time_limits_change_nothing() -> None:
    same(unbroken(accumulated), broken(accumulated, [5, 9], every="1 steps"))
    limited = broken(per_epoch, [], epochs=1, time_limit=1e-9)
    assert limited.lives == 9, "eight batches, and a last life that ends the epoch"
    same(unbroken(per_epoch, epochs=1), limited)


def test_a_longer_schedule_goes_on_from_where_it_was(tmp_path: Path) -> None:
    def build(epochs: int) -> Script:
        return script(lambda o: OneCycleLR(o, 0.05, total_steps=8 * epochs))

    options = {"save": tmp_path, "resume": True, "progress": False}
    made = build(2)
    made.loop.fit(made.loader, epochs=2, **options)
    made = build(4)
    made.loop.fit(made.loader, epochs=4, **options)
    (scheduler,) = made.loop._core.schedule.schedulers
    assert (scheduler.total_steps, scheduler.last_epoch) == (32, 32)
    longer = build(4)
    longer.loop.fit(longer.loader, epochs=4, progress=False)
    assert scheduler.get_last_lr() == longer.loop._core.schedule.schedulers[0].get_last_lr()


def test_settings_of_the_script_win_where_training_does_not_change_them(tmp_path: Path) -> None:
    options = {"save": tmp_path, "resume": True, "progress": False}
    made = script()
    made.loop.fit(made.loader, epochs=1, **options)
    made = script(accumulate=2)
    made.loop.model[3].p = 0.7
    made.loop.fit(made.loader, epochs=2, **options)
    assert made.loop.model[3].p == 0.7
    assert made.loop.plan.accumulate == 2
    assert made.loop.steps == 8 + 4


@pytest.mark.filterwarnings("ignore:the loss is not that of its micro-batches")  # this model is another in each call
def test_the_same_loop_goes_on_in_a_notebook() -> None:
    """Nothing is built anew there, and a second Ctrl-C may have left a window of accumulation half full."""
    with tempfile.TemporaryDirectory() as folder:
        made = started(moving_and_accumulating)
        options = {"save": folder, "every": "1 steps", "resume": True, "progress": False, "epochs": 3, **made.more}
        for step in (5, 11):
            at_step(made.loop, step, signalled(signal.SIGINT, 2), after=True)
        reports = [made.loop.fit(made.loader, **options) for _ in range(3)]
        assert [report.interrupted for report in reports] == [True, True, False]
        notebook = ended(made, reports[-1])
        again = started(moving_and_accumulating)
        report = again.loop.fit(again.loader, **{**options, "epochs": 4})
        assert report.resumed == 3
        assert again.loop.model.calls == 32
        assert again.loop.model.inner[0].weight.requires_grad
    same(unbroken(moving_and_accumulating), notebook)


@pytest.mark.parametrize(("stops", "phase"), [(8, "early"), (13, "late")])
def test_what_came_after_the_checkpoint_is_undone_in_a_notebook(stops: int, phase: str, tmp_path: Path) -> None:
    """What a model keeps is as it was at the checkpoint, though nothing was saved of what had not changed by then."""
    made = started(moving)
    options = {"save": tmp_path, "every": "5 steps", "resume": True, "progress": False, "epochs": 3}

    def is_written() -> None:  # that of step 5, so that the next is taken when it is due
        while not any(path.name.startswith("step-") for path in tmp_path.iterdir()):
            time.sleep(0.01)

    at_step(made.loop, 6, is_written, after=True)
    at_step(made.loop, stops, signalled(signal.SIGINT, 2), after=True)
    made.loop.fit(made.loader, **options)
    assert made.loop.model.phase == "late"
    made.loop.model.inner[3].p = 0.5  # by hand
    stopped = made.loop.fit(made.loader, **options, time_limit=1e-9)
    assert stopped.resumed == 1
    assert made.loop.model.inner[3].p == 0.5
    assert made.loop.model.phase == phase
    assert made.loop.model.inner[0].weight.requires_grad == (phase == "late")
    assert made.loop.model.calls == stopped.steps


def moving_and_accumulating() -> Script:
    return script(model=Moving, accumulate=3)


def test_how_an_optimizer_computes_is_a_setting(tmp_path: Path) -> None:
    first = script(optimizer=lambda parameters, lr: torch.optim.AdamW(parameters, lr, foreach=True))
    first.loop.fit(first.loader, save=tmp_path, progress=False)
    made = script(optimizer=lambda parameters, lr: torch.optim.AdamW(parameters, lr, foreach=False))
    made.loop.fit(made.loader, epochs=2, save=tmp_path, resume=True, progress=False)
    assert made.loop._core.subject.optimizers[0].param_groups[0]["foreach"] is False


# A checkpoint of something else


def other_model() -> Script:
    return script(model=lambda: nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3)))


def other_optimizer() -> Script:
    return script(optimizer=momentum)


def more_groups() -> Script:
    made = script()
    made.loop._core.subject.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    return made


def parameters_in_another_order() -> Script:
    return script(optimizer=lambda parameters, lr: torch.optim.AdamW([*parameters][::-1], lr))


def two_optimizers() -> Script:
    model = network()
    halves = [torch.optim.AdamW(half.parameters(), 0.02) for half in (model[:2], model[2:])]
    return Script(Loop(model, halves, nn.CrossEntropyLoss(), device="cpu", plan="plain"), shuffled())


OTHERS = {
    other_model: r"another model: 9 tensors differ .*; 0\.bias is float32\[9\] here and float32\[8\] in the checkpoint",
    other_optimizer: "the optimizer is SGD here and AdamW in the checkpoint",
    more_groups: "1 tensor differs .*number 1 is float32.* here and not there",
    parameters_in_another_order: "in another order than in the checkpoint: 4.bias for 0.weight",
    two_optimizers: "has 1 optimizers, and this loop has 2",
    per_epoch: "has 0 schedulers, and this loop has 1",
}


@pytest.mark.parametrize(("build", "says"), OTHERS.items(), ids=[build.__name__ for build in OTHERS])
def test_a_checkpoint_of_something_else_is_refused_before_anything_changes(
    tmp_path: Path, build: Callable[[], Script], says: str
) -> None:
    first = script()
    first.loop.fit(first.loader, save=tmp_path, progress=False)
    made = build()
    before = ended(made, first.loop.fit(first.loader, progress=False))
    modes = [module.training for module in made.loop.model.modules()]
    with pytest.raises(BadArgument, match=says) as refusal:
        made.loop.fit(made.loader, epochs=2, save=tmp_path, resume=True, progress=False)
    assert refusal.value.fix
    after = ended(made, before.report)
    same(before, after)
    assert modes == [module.training for module in made.loop.model.modules()]


def test_a_scheduler_of_another_kind_is_refused(tmp_path: Path) -> None:
    first = per_epoch()
    first.loop.fit(first.loader, save=tmp_path, progress=False)
    with pytest.raises(BadArgument, match=r"has the schedulers \['StepLR'\], and this loop \['ReduceLROnPlateau'\]"):
        plateau().loop.fit(first.loader, save=tmp_path, resume=True, progress=False)


def test_a_state_of_a_later_version_is_refused() -> None:
    loop = script().loop
    with pytest.raises(BadArgument, match="format 99") as refusal:
        loop.load_state_dict({**loop.state_dict(), "format": 99})
    assert "version" in str(refusal.value.fix)


# Plans


def test_a_plan_that_was_found_is_carried_on(tmp_path: Path) -> None:
    made = auto()
    found = made.loop.tune(made.loader, steps=50, progress=False)
    plan = replace(made.loop.plan, channels_last=True)
    made.loop._core.switch.resume_plan(plan)
    made.loop.fit(made.loader, save=tmp_path, progress=False)
    made = auto()
    made.loop.fit(made.loader, epochs=2, save=tmp_path, resume=True, progress=False)
    assert made.loop.plan == plan
    assert made.loop.tuning == found
    kept = auto(plan="plain")
    kept.loop.fit(kept.loader, epochs=3, save=tmp_path, resume=True, progress=False)
    assert kept.loop.plan == auto(plan="plain").loop.plan, "who asks for a plan gets it"


def auto(**options: Any) -> Script:
    model = network(norm=False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    return Script(Loop(model, optimizer, nn.CrossEntropyLoss(), **{"device": "cpu"} | options), shuffled())


def test_a_plan_of_another_kind_of_device_is_left_behind() -> None:
    loop = auto().loop
    plan = Plan("cuda", precision="bf16", graph=1, tf32=True)
    tuned = auto()
    tuning = tuned.loop.tune(tuned.loader, steps=20, progress=False)
    state = {**loop.state_dict(), "plan": plan.to_json(), "tuning": replace(tuning, plan=plan).to_json()}
    before = loop.plan
    loop.load_state_dict(state)
    assert loop.plan == before
    assert loop.tuning is None, "the tuner of this device is yet to look"


def test_what_the_person_asks_for_comes_before_the_plan_of_the_checkpoint() -> None:
    state = auto().loop.state_dict()
    state["plan"] = replace(Plan.from_json(state["plan"]), accumulate=4, precision="bf16", fused=True).to_json()
    loop = auto(precision="fp32", clip_norm=0.1).loop
    loop.load_state_dict(state)
    assert (loop.plan.accumulate, loop.plan.precision, loop.plan.clip_norm, loop.plan.fused) == (1, "fp32", 0.1, True)


# On a GPU


def on_a_gpu(device: str = "cuda", **plan: Any) -> Script:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    scheduler = OneCycleLR(optimizer, 0.02, total_steps=32, cycle_momentum=False)
    chosen = Plan(device, **plan) if plan else "auto"
    loop = Loop(model, optimizer, nn.CrossEntropyLoss(), device=device, plan=chosen, scheduler=scheduler)
    return Script(loop, shuffled(), held_out())


GPU_PLANS: list[dict[str, Any]] = [
    {"stream": "direct"},
    {"stream": "prefetched"},
    {"stream": "resident"},
    {"stream": "direct", "precision": "fp16"},
    {"stream": "direct", "graph": 1},
    {"stream": "resident", "graph": 4},
]


@pytest.mark.gpu
@pytest.mark.parametrize("plan", GPU_PLANS, ids=str)
def test_a_run_on_a_gpu_that_is_stopped_ends_as_one_that_was_not(
    monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any]
) -> None:
    whole = unbroken(lambda: on_a_gpu(**plan), epochs=4)
    plain, left = Display.stretch, iter([4, 6, 3])

    def build() -> Script:
        count = next(left, 10**6)

        def stretch(self: Display, *seen: Any) -> None:
            nonlocal count
            count -= 1
            if count == 0:
                signal.raise_signal(signal.SIGTERM)
            plain(self, *seen)

        monkeypatch.setattr(Display, "stretch", stretch)
        return on_a_gpu(**plan)

    stopped = broken(build, [], epochs=4, progress=True)
    assert stopped.lives == 4
    assert stopped.report.steps == whole.report.steps
    for name, tensor in whole.tensors.items():
        if not name.startswith(("watch", "random")):  # what is seen of the losses depends on when they are looked at
            torch.testing.assert_close(tensor, stopped.tensors[name], rtol=1e-4, atol=1e-6, msg=name)
    for one, other in zip(whole.report.epochs, stopped.report.epochs, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.metrics == pytest.approx(other.metrics, rel=1e-3)


@pytest.mark.gpu
def test_nothing_waits_where_a_loop_tells_its_state(no_waits) -> None:
    made = on_a_gpu(stream="resident")
    made.loop.fit(made.loader, progress=False)
    with no_waits():
        pack(made.loop.state_dict())


@pytest.mark.gpu
def test_a_run_of_a_gpu_goes_on_without_one(tmp_path: Path) -> None:
    made = on_a_gpu(stream="resident", graph=4)
    first = made.loop.fit(made.loader, epochs=1, save=tmp_path, progress=False)
    here = on_a_gpu("cpu").loop
    report = here.fit(shuffled(), epochs=2, save=tmp_path, resume=True, progress=False)
    assert (report.device, report.steps, report.resumed) == ("cpu", 16, 1)
    assert report.epochs[0] == first.epochs[0]
    assert here.plan.graph == 0
    assert here.optimizers[0].param_groups[0]["lr"] < 0.02


def test_a_loop_has_a_state_dict_as_everything_in_pytorch_has() -> None:
    """By hand, in memory: what is loaded into another loop trains on to the same bits."""

    def built() -> tuple[Loop, nn.Module]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        ema = torch.optim.swa_utils.AveragedModel(model)
        optimizer.register_step_post_hook(lambda *_: ema.update_parameters(model))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        options = {"scheduler": scheduler, "schedule": "step", "accumulate": 2, "stateful": {"ema": ema}}
        return Loop(model, optimizer, nn.MSELoss(), device="cpu", plan="plain", **options), ema

    def trained(loop: Loop, steps: int) -> None:
        for _ in range(steps):
            loop.step([torch.randn(6, 4), torch.randn(6, 2)])

    loop, ema = built()
    trained(loop, 8)
    state = copy.deepcopy(loop.state_dict())
    trained(loop, 8)
    other, its_ema = built()
    trained(other, 2)
    other.load_state_dict(state)
    assert other.steps == 4
    trained(other, 8)
    assert other.steps == loop.steps == 8
    for one, two in ((loop.model, other.model), (ema, its_ema)):
        assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))

    before = copy.deepcopy(other.state_dict())
    with pytest.raises(BadArgument, match="stateful"):
        other.load_state_dict({**state, "stateful": {}})
    with pytest.raises(HotloopError):
        other.load_state_dict({**state, "model": {}})
    assert torch.equal(before["model"]["0.weight"], other.model.state_dict()["0.weight"])


def test_a_state_is_read_by_torch_load_and_one_with_the_arrays_of_numpy_is_taken_too(tmp_path: Path) -> None:
    loop = script().loop
    np.random.seed(7)
    torch.save(loop.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    arrays = {**state, "random": {**state["random"], "numpy": np.random.get_state(legacy=False)}}
    expected = np.random.rand()
    for each in (state, arrays):
        np.random.seed(8)
        loop.load_state_dict(each)
        assert np.random.rand() == expected


@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_whose_hook_leaves_weights_out_of_its_state(tmp_path: Path, frozen: bool) -> None:
    def leave_out(model: nn.Module, state: dict[str, Any], *_: object) -> None:
        for name in [name for name in state if name.startswith("0.")]:
            del state[name]

    def build() -> Loop:
        model = nn.Sequential(nn.Linear(6, 3).requires_grad_(not frozen), nn.Linear(3, 3))
        model.register_state_dict_post_hook(leave_out)
        learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return Loop(model, torch.optim.SGD(learns, 0.1), nn.CrossEntropyLoss(), device="cpu", plan="plain")

    first = build()
    first.fit(shuffled(), save=tmp_path, progress=False)
    again = build()
    before = again.model[1].weight.detach().clone()
    if frozen:
        again.fit(shuffled(), save=tmp_path, resume=True, progress=False)
        assert torch.equal(again.model[1].weight, first.model[1].weight)
        with pytest.warns(CheckpointWarning, match=r"differ in: 0\.weight, 0\.bias"):
            build().fit(shuffled(), epochs=2, save=tmp_path, resume=True, progress=False)
    else:
        with pytest.raises(BadArgument, match=r"load_state_dict differ in 0\.weight, 0\.bias"):
            again.fit(shuffled(), save=tmp_path, resume=True, progress=False)
        assert torch.equal(again.model[1].weight, before), "nothing has changed"


AGREED = {"ranks": 1, "windows": 3, "unit": 8.0, "ratio": None, "on_device": False, "is_sum": False}
WRONG = [
    {"unit": 0.0},
    {"unit": float("nan")},
    {"unit": "8"},
    {"windows": -1},
    {"ratio": -1.0},
    {"is_sum": 1},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_ranks_are_said_to_have_agreed_on_is_checked(wrong: dict[str, Any]) -> None:
    model = nn.Linear(2, 1)
    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu")
    state = loop.state_dict()
    state["update"]["across"] = {"loss": AGREED}
    loop.load_state_dict(state)
    state["update"]["across"] = {"loss": AGREED | wrong}
    with pytest.raises(HotloopError, match="across"):
        loop.load_state_dict(state)
