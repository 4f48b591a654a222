"""The tuner on a real loop: it leaves everything as it was, and what it keeps is faster."""

import copy
import json
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import PlanWarning
from hotloop.levers import LEVERS, Lever
from hotloop.plan import Plan, Trial, Tuning
from hotloop.report.tuning import tuning_words

from ..same import same

pytestmark = pytest.mark.usefixtures("light_heap")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Odd(nn.Module):
    """A model with everything that a step may change: weights that are shared, buffers, plain numbers, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.head.weight
        self.drop = nn.Dropout(0.1)
        self.calls = 0
        self.ema = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        features = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        out, _ = self.rnn(features)
        self.ema = self.ema.to(x.device) * 0.9 + out.detach().mean((0, 1)) * 0.1
        return self.tied(self.drop(self.head(out.mean(1))))


def odd_loop(device: str, **options: Any) -> tuple[hotloop.Loop, DataLoader[Any]]:
    torch.manual_seed(0)
    x = torch.randn(96, 3, 4, 4)
    loader = DataLoader(TensorDataset(x, x.mean((1, 2, 3)).sign().long() + 1), 16, shuffle=True)
    with pytest.warns(hotloop.errors.LeftBehindWarning) if device == "cuda" else nullcontext():
        model = Odd()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device=device, **options)
    return loop, loader


def everything(loop: hotloop.Loop) -> dict[str, Any]:
    """All that a tuning may not change."""
    optimizer = loop.optimizers[0]
    return {
        "weights": {name: value.clone() for name, value in loop.model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in loop.model.parameters()],
        "optimizer": copy.deepcopy(optimizer.state_dict()["state"]),
        "calls": loop.model.calls,
        "ema": loop.model.ema.clone(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if loop.device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "training": loop.model.training,
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("trained", [False, True])
def test_everything_is_as_it_was_before(device: str, trained: bool, tmp_path: Path) -> None:
    """So the training after it has the same batches in the same order; and a second tuning begins at the plain loop."""
    loop, loader = odd_loop(device)
    if trained:
        loop.fit(loader, epochs=1, progress=False)
    before = everything(loop)
    tuning = loop.tune(loader, steps=50, progress=False)
    assert same(before, everything(loop))
    assert {trial.verdict for trial in tuning.trials} >= {"not tried"}
    (tmp_path / "plan.json").write_text(json.dumps(tuning.to_json()))
    assert Tuning.from_json(json.loads((tmp_path / "plan.json").read_text())) == tuning
    assert odd_loop(device, plan=str(tmp_path / "plan.json"))[0].plan == tuning.plan
    loop._core.switch.carry_out(Plan(loop.plan.device, fused=True, channels_last=True), "a test")
    if not trained:
        again = {trial.lever: trial.why for trial in loop.tune(loader, steps=10, progress=False).trials}
        assert "already" not in again["fused"] + again["channels last"]
    plain, _ = odd_loop(device, plan="plain")
    orders = []
    for each in (loop, plain):
        torch.set_rng_state(before["torch"])
        orders.append([batch[0].sum().item() for batch in each.batches(loader)])
    assert orders[0] == orders[1]


def test_a_random_augmentation_is_not_disturbed() -> None:
    class Augmented(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return tuple(t + torch.rand(()) for t in super().__getitem__(index))

    def batches(tune: bool) -> list[float]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        loader = DataLoader(Augmented(torch.zeros(32, 4), torch.zeros(32, 1)), 8, shuffle=True)
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.01), nn.MSELoss(), device="cpu")
        if tune:
            loop.tune(loader, steps=10, progress=False)
            loop._core.switch.carry_out(Plan("cpu"), "a test")
        return [float(loop.step(batch)) for batch in loop.batches(loader)]

    assert batches(True) == batches(False)


@pytest.mark.parametrize("options", [{"steps": 0}, {"seconds": -1.0}, {}])
def test_a_generator_and_a_run_of_no_length_are_refused(options: dict[str, Any]) -> None:
    loop, loader = odd_loop("cpu")
    with pytest.raises(hotloop.HotloopError, match="above 0" if options else "read only once"):
        loop.tune(loader if options else iter(loader), **options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "holds no plan"),
        ('{"plan": {"device": "cpu", "graph": -1}}', "graph=-1"),
        ("[]", "no plan"),
        ("[" * 100_000, "holds no plan"),
        ('{"plan": [1]}', "holds no plan: a list in place of a plan"),
        ('{"plan": {"device": "cpu", "recompute": 3}}', "holds no plan"),
        ('{"plan": {"device": "cpu", "tf32": "yes"}}', "tf32='yes'"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(hotloop.HotloopError, match=words):
        odd_loop("cpu", plan=str(file))
    with pytest.raises(hotloop.HotloopError, match="cannot be read"):
        odd_loop("cpu", plan=str(tmp_path / "absent.json"))


def test_a_plan_from_a_gpu_runs_on_a_cpu_without_what_it_cannot_do(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(Plan("cuda:0", graph=4, tf32=True, channels_last=True).to_json()))
    with pytest.warns(PlanWarning, match="needs a CUDA device"):
        loop, loader = odd_loop("cpu", plan=str(file))
    assert loop.plan == Plan("cpu", channels_last=True)
    loop.fit(loader, progress=False)


@pytest.mark.parametrize(
    "settings",
    [{"accumulate": 2}, {"micro_batch": 4}, {"split": "items"}, {"workers": 1}, {"precision": "bf16"}],
    ids=str,
)
def test_settings_that_contradict_the_plan_are_refused(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(hotloop.HotloopError, match=f"{name}={value!r} and a plan with {name}="):
        odd_loop("cpu", plan=Plan(), **settings)
    loop, _ = odd_loop("cpu", plan=Plan(**settings), **settings)
    assert getattr(loop.plan, name) == value


def test_a_plan_without_a_device_runs_where_the_loop_does() -> None:
    model = nn.Linear(1, 1)
    for device in ("cpu", None):
        loop = hotloop.Loop(
            model, torch.optim.SGD(model.parameters()), nn.MSELoss(), device=device, plan=Plan(fused=True)
        )
        assert loop.device == hotloop.pick(device).device
        assert loop.plan == Plan(str(loop.device), fused=True)


def test_a_short_run_is_not_tuned() -> None:
    loop, loader = odd_loop("cpu")
    report = loop.fit(loader, progress=False)
    assert loop.tuning is None
    assert len(report.plans) == 1


class Viewing(nn.Module):
    """A tutorial's network: its `view` does not work on images whose channels lie together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.linear = nn.Linear(8 * 64 + 3 * 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.cat([self.conv(x).flatten(1), x.view(x.size(0), -1)], 1))


def image_loop(model: nn.Module, **options: Any) -> tuple[hotloop.Loop, DataLoader[Any]]:
    x = torch.randn(64, 3, 8, 8)
    loader = DataLoader(TensorDataset(x, torch.randint(0, 3, (64,))), 16, shuffle=True)
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss(), device="cpu", **options)
    return loop, loader


def test_a_lever_that_the_model_does_not_bear_is_dropped_with_the_reason() -> None:
    """And what a plan by hand asks for stays."""
    loop, loader = image_loop(Viewing(), plan=Plan("cpu", accumulate=4, clip_norm=0.5))
    tuning = loop.tune(loader, steps=10, progress=False)
    (trial,) = [trial for trial in tuning.trials if trial.lever == "channels last"]
    assert trial.verdict == "dropped"
    assert "view" in trial.why
    assert (tuning.plan.accumulate, tuning.plan.clip_norm) == (4, 0.5)
    loop.fit(loader, progress=False)


class Rough(nn.Module):
    """A network that is faster in bf16, where a small difference of large numbers is lost; or without its pause."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 8), nn.Parameter(torch.ones(8))
        self.offset, self.pause = offset, 2e-3

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            time.sleep(self.pause)
        return (self.layer(x + self.offset) - self.layer(torch.full_like(x, self.offset))) * self.scale


def only_trial(lever: Lever, offset: float, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """Of a tuning that knows no other lever; the weights are as before."""
    for module in ("hotloop.levers", "hotloop.tune.trial"):
        monkeypatch.setattr(f"{module}.LEVERS", (lever,))
    model, x = Rough(offset), torch.randn(64, 4)
    before = [p.clone() for p in model.parameters()]
    loader = DataLoader(TensorDataset(x, x.repeat(1, 2)), 8)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cpu")
    (trial,) = loop.tune(loader, steps=1000, progress=False).trials
    assert same(before, list(model.parameters()))
    assert trial.gain > 1.01
    assert lever.is_pulled(loop.plan) == (trial.verdict == "kept")
    return trial


@pytest.mark.parametrize(("offset", "verdict"), [(0.0, "kept"), (4096.0, "dropped")])
def test_a_faster_lever_is_kept_where_loss_and_gradient_are_those_of_fp32(
    offset: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lever = copy.copy(next(lever for lever in LEVERS if lever.name == "bf16"))
    monkeypatch.setattr(lever, "obstacle", lambda target, plan: None)
    trial = only_trial(lever, offset, monkeypatch)
    assert trial.verdict == verdict
    assert ("fp32" in trial.why) == (verdict == "dropped")


class Hasty(Lever):
    """Other code that computes the same without a pause; where it is wrong, one small gradient in another order."""

    name, order, tier, what, cost, undo = "hasty", 65, "B", "nothing is waited for", "nothing", "it waits again"
    computes_the_same = True
    wrong = False

    def apply(self, model: Any, optimizers: Any, plan: Plan) -> Any:
        model.pause = 0.0
        yield lambda: setattr(model, "pause", 2e-3)
        if self.wrong:
            yield model.scale.register_hook(lambda gradient: gradient.flip(0)).remove


@pytest.mark.parametrize("wrong", [False, True])
def test_faster_code_is_kept_where_each_parameter_has_the_eager_gradient(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lever = Hasty()
    lever.wrong = wrong
    trial = only_trial(lever, 0.0, monkeypatch)
    assert trial.verdict == ("dropped" if wrong else "kept"), trial
    assert ("the gradient of scale is" in trial.why) == wrong


class Adversary:
    """Counts its calls, and trains a part of the model by itself, as an objective with an inner optimizer does."""

    def __init__(self, part: nn.Module) -> None:
        self.inner = torch.optim.Adam(part.parameters(), 0.1)
        self.seen: list[int] = []

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen.append(len(batch[0]))
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward(retain_graph=True)
        self.inner.step()
        return nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.mark.filterwarnings("ignore:no optimizer of the loop holds")  # the objective has its own for them
def test_a_step_that_changes_what_cannot_be_restored_is_run_once() -> None:
    model, x = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 1)), torch.randn(64, 16)
    adversary = Adversary(model[0])
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    loop = hotloop.Loop(model, optimizer, objective=adversary, device="cpu")
    with pytest.warns(PlanWarning, match=r"real steps have changed .*inner.*, which cannot be restored"):
        tuning = loop.tune(DataLoader(TensorDataset(x, x[:, :1]), 16), steps=100, progress=False)
    assert adversary.seen == [], "what can be restored is"
    assert {int(state["step"]) for state in adversary.inner.state.values()} == {1}
    assert {(trial.verdict, "a step changes" in trial.why) for trial in tuning.trials} == {("not tried", True)}


def test_the_layout_is_put_back_when_another_plan_needs_none() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    loop, _ = image_loop(model)
    loop._core.switch.carry_out(Plan("cpu", channels_last=True), "a test")
    assert not model[0].weight.is_contiguous()
    loop._core.switch.carry_out(Plan("cpu"), "a test")
    assert model[0].weight.is_contiguous()


def test_an_edited_forward_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, loader = odd_loop("cpu")
    batch = next(iter(loader))
    before = loop._core.subject.key(batch, loader)
    assert loop._core.subject.key(batch, loader) == before
    monkeypatch.setattr(type(loop.model), "forward", lambda self, x: x * 2)
    assert loop._core.subject.key(batch, loader) != before


class Slow(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Items that take longer to load than to learn from."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(1e-3)
        return torch.full((4,), float(index)), torch.ones(1)


def test_where_nothing_is_kept_the_plan_takes_the_time_of_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of one was timed with the loader and that of the other without: 0.338 times the plain loop."""
    monkeypatch.setattr("hotloop.tune.trial.LEVERS", ())
    model, loader = nn.Linear(4, 1), DataLoader(Slow(), 8)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu")
    tuning = loop.tune(loader, steps=10, progress=False)
    assert tuning.gain == 1.0
    assert "the plain loop stays: no lever was tried" in tuning_words(tuning)
