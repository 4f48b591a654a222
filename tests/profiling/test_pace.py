"""The pace of training loops: what is timed is the person's own training."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.profiling.pace import REPEATS, FittedLoop, LoopPace, TutorialLoop, timed


def pair(**options: Any) -> tuple[hotloop.Loop, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 16)
    make = options.pop("optimizer", lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9))
    options = {"loss": nn.CrossEntropyLoss(), "plan": "plain", **options}
    return hotloop.Loop(model, make(model.parameters()), device="cpu", **options), loader


TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate": 2},
    "a clipped norm": {"clip_norm": 0.01},
    "clipped values": {"clip_value": 0.005},
    "an optimizer that computes the loss": {"optimizer": lambda weights: torch.optim.LBFGS(weights, max_iter=3)},
}


@pytest.mark.parametrize("options", TRAININGS.values(), ids=TRAININGS)
def test_the_tutorials_loop_trains_as_the_plain_plan_does(options: dict[str, Any]) -> None:
    loop, loader = pair(**options)
    loop.fit(loader, epochs=2, progress=False, monitor=False)
    other, loader = pair(**options)
    hand = TutorialLoop(other.model, other.objectives, loader, other.plan)
    items = [hand.run(0.0)[0] for _ in range(8)]
    assert items == [16] * 8
    for mine, theirs in zip(loop.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_objectives_that_take_turns_are_trained_as_often_as_in_the_loop() -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    calls: list[str] = []

    def objective(name: str) -> Any:
        def loss(model: Any, batch: Any) -> Any:
            calls.append(name)
            return model[name](batch[0]).mean()

        return loss

    optimizers = {name: torch.optim.SGD(model[name].parameters(), 0.1) for name in model}
    objectives = {name: objective(name) for name in model}
    every = {"b": 2}
    loop = hotloop.Loop(model, optimizers, objective=objectives, train_every=every, device="cpu", plan="plain")
    hand = TutorialLoop(loop.model, loop.objectives, [(torch.ones(2, 1),)] * 4, loop.plan)
    for _ in range(4):
        hand.run(0.0)
    assert calls == ["a", "b", "a", "a", "b", "a"]


def test_a_transform_on_the_device_is_part_of_both() -> None:
    for way in ("tutorial", "fit"):
        seen: list[int] = []
        loop, loader = pair()

        def transform(batch: Any, seen: list[int] = seen) -> Any:
            seen.append(len(batch[0]))
            return batch

        if way == "tutorial":
            TutorialLoop(loop.model, loop.objectives, loader, loop.plan, transform).run(0.0)
        else:
            loop.fit(loader, device_transform=transform, progress=False)
        assert seen[:1] == [16]


def test_fit_runs_as_many_epochs_as_the_time_takes() -> None:
    loop, loader = pair()
    fitted = FittedLoop(lambda **options: loop.fit(loader, progress=False, monitor=False, **options))
    fitted.run(60.0)
    assert len(fitted.last.epochs) == 1, "the first one tells how long an epoch is"
    taken = fitted.last.epochs[0].seconds
    items, seconds = fitted.run(2.5 * taken)
    assert 1 <= len(fitted.last.epochs) <= 3
    assert items == sum(epoch.items for epoch in fitted.last.epochs)
    assert seconds <= fitted.last.seconds


def test_ctrl_c_in_fit_ends_the_measurement() -> None:
    loop, loader = pair()

    def press(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    fitted = FittedLoop(lambda **options: loop.fit(loader, progress=False, on_step=press, **options))
    with pytest.raises(KeyboardInterrupt):
        timed(fitted.run, 60.0)


def test_repeats_follow_a_warm_up_and_are_not_part_of_it() -> None:
    asked: list[float] = []

    def run(seconds: float) -> tuple[int, float]:
        asked.append(seconds)
        time.sleep(seconds)
        return 10 * len(asked), 2.0

    rates = timed(run, 0.2)
    assert asked[0] == pytest.approx(0.1, abs=0.01)
    assert len(rates) == REPEATS
    assert rates[-1] == 5.0 * len(asked)


def test_a_pace_compares_with_another_where_both_are_known() -> None:
    slow, fast = LoopPace("cpu", "tutorial", (90.0, 100.0, 130.0)), LoopPace("cuda:0", "fit", (300.0,))
    assert slow.rate == 100.0
    assert fast.times(slow) == 3.0
    assert fast.times(None) is None
    assert LoopPace("cpu", "fit", failure="no").times(slow) is None
    assert LoopPace.from_json(fast.to_json()) == fast
