"""The tuner on a real loop: it leaves everything as it was, and what it keeps is faster."""

import copy
import itertools
import json
import random
import time
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
from hotloop.plan import Plan, Tuning
from hotloop.report.tuning import tuning_words
from hotloop.tune.plan_cache import Cache

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
    with pytest.warns(hotloop.errors.LeftBehindWarning) if device == "cuda" else _nothing():
        model = Odd()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device=device, **options)
    return loop, loader


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def everything(loop: hotloop.Loop) -> dict[str, Any]:
    """All that a tuning may not change."""
    optimizer = loop._core.optimizers[0]
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


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("trained", [False, True])
def test_everything_is_as_it_was_before(device: str, trained: bool) -> None:
    loop, loader = odd_loop(device)
    if trained:
        loop.fit(loader, epochs=1, progress=False)
    before = everything(loop)
    tied = loop.model.tied.weight is loop.model.head.weight
    tuning = loop.tune(loader, steps=50, progress=False)
    assert tied
    assert {trial.verdict for trial in tuning.trials} >= {"not tried"}
    assert_same(before, everything(loop))


@pytest.mark.parametrize("device", DEVICES)
def test_the_training_after_it_is_the_training_without_it(device: str) -> None:
    """Same batches in the same order, same random numbers; only what the plan rounds may differ."""
    plain, loader = odd_loop(device, plan="plain")
    generator = torch.get_rng_state()
    seen = [batch[0].sum().item() for batch in plain.batches(loader)]
    tuned, loader = odd_loop(device)
    torch.set_rng_state(generator)
    tuned.tune(loader, steps=100, progress=False)
    assert seen == [batch[0].sum().item() for batch in tuned.batches(loader)]


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
            loop._core.carry_out(Plan("cpu"), "a test")
        return [float(loop.step(batch)) for batch in loop.batches(loader)]

    assert batches(True) == batches(False)


def test_a_generator_is_refused() -> None:
    loop, loader = odd_loop("cpu")
    with pytest.raises(hotloop.HotloopError, match="read only once"):
        loop.tune(iter(loader), steps=10)


def test_a_plan_goes_to_a_file_and_back(tmp_path: Path) -> None:
    loop, loader = image_loop(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)))
    tuning = loop.tune(loader, steps=20, progress=False)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(tuning.to_json()))
    assert Tuning.from_json(json.loads(file.read_text())) == tuning
    again, _ = odd_loop("cpu", plan=str(file))
    assert again.plan == tuning.plan


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
    report = loop.fit(loader, epochs=2, progress=False)
    assert loop.tuning is None
    assert len(report.plans) == 1


def slow_loop(**options: Any) -> tuple[hotloop.Loop, DataLoader[Any]]:
    """A loop that is long enough to be tuned by itself, in a few seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    x = torch.randn(2048, 16)
    loader = DataLoader(TensorDataset(x, x[:, :1]), 16, shuffle=True)
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), nn.MSELoss(), device="cpu", **options)
    return loop, loader


class Viewing(nn.Module):
    """A tutorial's network: its `view` does not work on images whose channels lie together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.linear = nn.Linear(8 * 64 + 3 * 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.cat([self.conv(x).flatten(1), x.view(x.size(0), -1)], 1))


def image_loop(model: nn.Module) -> tuple[hotloop.Loop, DataLoader[Any]]:
    x = torch.randn(64, 3, 8, 8)
    loader = DataLoader(TensorDataset(x, torch.randint(0, 3, (64,))), 16, shuffle=True)
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss(), device="cpu")
    return loop, loader


def test_a_lever_that_the_model_does_not_bear_is_dropped_with_the_reason() -> None:
    loop, loader = image_loop(Viewing())
    tuning = loop.tune(loader, steps=10, progress=False)
    (trial,) = [trial for trial in tuning.trials if trial.lever == "channels last"]
    assert trial.verdict == "dropped"
    assert "view" in trial.why
    loop.fit(loader, progress=False)


class Rough(nn.Module):
    """A network that is faster in bf16, where a small difference of large numbers is lost."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            time.sleep(2e-3)
        return self.layer(x + self.offset) - self.layer(torch.full_like(x, self.offset))


@pytest.mark.parametrize(("offset", "verdict"), [(0.0, "kept"), (4096.0, "dropped")])
def test_a_faster_lever_is_kept_where_loss_and_gradient_are_those_of_fp32(
    offset: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lever = copy.copy(next(lever for lever in LEVERS if lever.name == "bf16"))
    monkeypatch.setattr(lever, "obstacle", lambda target, plan: None)
    monkeypatch.setattr("hotloop.tune.trial.LEVERS", (lever,))
    model, x = Rough(offset), torch.randn(64, 4)
    before = [p.clone() for p in model.parameters()]
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cpu")
    (trial,) = loop.tune(loader, steps=1000, progress=False).trials
    assert trial.verdict == verdict
    assert trial.gain is not None
    assert trial.gain > 1.01
    assert trial.drift is not None
    assert ("fp32" in trial.why) == (verdict == "dropped")
    assert loop.plan.precision == ("bf16" if verdict == "kept" else "fp32")
    assert_same(before, list(model.parameters()))


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


class Pausing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.scale, self.head, self.pause = nn.Parameter(torch.ones(8)), nn.Linear(8, 1), 2e-3

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause)
        return self.head(self.layers(x) * self.scale)


@pytest.mark.parametrize("wrong", [False, True])
def test_faster_code_is_kept_where_each_parameter_has_the_eager_gradient(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lever = Hasty()
    lever.wrong = wrong
    for module in ("hotloop.levers", "hotloop.tune.trial"):
        monkeypatch.setattr(f"{module}.LEVERS", (lever,))
    model, x = Pausing(), torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cpu")
    (trial,) = loop.tune(loader, steps=1000, progress=False).trials
    assert trial.verdict == ("dropped" if wrong else "kept"), trial
    assert ("the gradient of scale is" in trial.why) == wrong


def test_a_step_that_changes_what_cannot_be_restored_is_run_once() -> None:
    seen: list[int] = []

    def objective(model: nn.Module, batch: Any) -> Tensor:
        seen.append(len(batch[0]))
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    model = nn.Linear(16, 1)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), objective=objective, device="cpu")
    with pytest.warns(PlanWarning, match=r"nothing is tuned: a step changes .*seen"):
        tuning = loop.tune(slow_loop()[1], steps=100, progress=False)
    assert seen == [16]
    assert {trial.verdict for trial in tuning.trials} == {"not tried"}


@pytest.mark.filterwarnings("ignore:no optimizer of the loop holds")  # the objective has its own for them
def test_an_optimizer_of_the_objective_is_stepped_once() -> None:
    class Adversary:
        """Trains a part of the model by itself, as an objective with an inner optimizer does."""

        def __init__(self, part: nn.Module) -> None:
            self.inner = torch.optim.Adam(part.parameters(), 0.1)

        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            loss.backward(retain_graph=True)
            self.inner.step()
            return nn.functional.mse_loss(model(batch[0]), batch[1])

    model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 1))
    adversary = Adversary(model[0])
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    loop = hotloop.Loop(model, optimizer, objective=adversary, device="cpu")
    with pytest.warns(PlanWarning, match=r"nothing is tuned: a step changes .*inner\.state"):
        loop.tune(slow_loop()[1], steps=100, progress=False)
    assert {int(state["step"]) for state in adversary.inner.state.values()} == {1}


def test_a_second_tuning_begins_at_the_plain_loop_again() -> None:
    loop, loader = image_loop(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)))
    loop.tune(loader, steps=10, progress=False)
    loop._core.carry_out(Plan("cpu", fused=True, channels_last=True), "a test")
    again = loop.tune(loader, steps=10, progress=False)
    verdicts = {trial.lever: trial for trial in again.trials}
    assert "already" not in verdicts["fused"].why
    assert "already" not in verdicts["channels last"].why


def test_what_a_plan_by_hand_asks_for_is_not_the_tuners_to_change() -> None:
    model = nn.Linear(4, 1)
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x[:, :1]), 8)
    plan = Plan("cpu", accumulate=4, clip_norm=0.5)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu", plan=plan)
    found = loop.tune(loader, steps=10, progress=False).plan
    assert (found.accumulate, found.clip_norm) == (4, 0.5)


def test_the_layout_is_put_back_when_another_plan_needs_none() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    loop, _ = image_loop(model)
    loop._core.carry_out(Plan("cpu", channels_last=True), "a test")
    assert not model[0].weight.is_contiguous()
    loop._core.carry_out(Plan("cpu"), "a test")
    assert model[0].weight.is_contiguous()


@pytest.mark.parametrize("options", [{"steps": 0}, {"seconds": -1.0}])
def test_a_run_of_no_length_is_refused(options: dict[str, Any]) -> None:
    loop, loader = slow_loop()
    with pytest.raises(hotloop.HotloopError, match="above 0"):
        loop.tune(loader, **options)


class Touchy(nn.Module):
    """A network whose result is lost in bf16: a small difference of large numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + 4096.0) - self.layer(torch.full_like(x, 4096.0))


def touchy_run() -> tuple[hotloop.Loop, list[float]]:
    torch.manual_seed(2)
    x = torch.randn(4000, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 2)
    model = Touchy()
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cpu")
    loop._core.expected = 1_000_000
    losses = [float(loop.step(batch)) for batch in itertools.islice(loop.batches(loader), 600)]
    return loop, losses


def test_a_plan_in_the_cache_is_not_carried_out_for_being_there() -> None:
    """It may not fit the code, or somebody else wrote it: what is remembered is what did not work."""
    first, losses = touchy_run()
    assert first.tuning is not None
    (file,) = Cache()._folder.iterdir()
    data = json.loads(file.read_text())
    data["plan"]["precision"] = "bf16"
    file.write_text(json.dumps(data))
    second, again = touchy_run()
    assert second.plan.precision == "fp32"
    assert again == pytest.approx(losses, rel=1e-4)


def test_an_edited_forward_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, loader = slow_loop()
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
