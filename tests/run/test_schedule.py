"""Schedules: a plateau is given what it watches, and one that nobody steps is told of."""

import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, ReduceLROnPlateau, SequentialLR

import hotloop
from hotloop.errors import BadArgument, PlanWarning

BATCHES = [(torch.ones(4, 2), torch.ones(4, 1))] * 2


class Watching(ReduceLROnPlateau):
    """Notes what it is given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.seen: list[float] = []
        super().__init__(*args, **options)

    def step(self, metrics: Any, epoch: Any = None) -> None:
        self.seen.append(float(metrics))
        super().step(metrics, epoch)


def watching(mode: Literal["min", "max"]) -> tuple[hotloop.Loop, Watching]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = Watching(optimizer, mode=mode)
    return hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", scheduler=scheduler), scheduler


def test_a_plateau_of_what_grows_watches_the_one_metric() -> None:
    loop, scheduler = watching("max")
    report = loop.fit(BATCHES, epochs=3, validate=BATCHES, metrics={"mean": lambda o, t: o}, progress=False)
    assert scheduler.seen == [epoch.metrics["mean"] for epoch in report.epochs]


def test_a_plateau_watches_the_validation_loss_or_else_that_of_training() -> None:
    loop, scheduler = watching("min")
    report = loop.fit(BATCHES, epochs=2, validate=BATCHES, progress=False)
    report = loop.fit(BATCHES, epochs=2, progress=False)
    assert scheduler.seen[2:] == [epoch.loss for epoch in report.epochs]
    assert len(scheduler.seen) == 4


def test_a_plateau_that_nobody_steps_is_told_of() -> None:
    loop, scheduler = watching("min")
    for epoch in range(2):
        with pytest.warns(PlanWarning, match="was not stepped between two epochs") if epoch else nullcontext():
            for batch in loop.batches(BATCHES):
                loop.step(batch)
    with warnings.catch_warnings(action="error"):
        for _ in range(2):
            scheduler.step(1.0)
            for batch in loop.batches(BATCHES):
                loop.step(batch)


# A warm-up and a cosine, and schedulers with a rhythm of their own


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize(("steps", "warmup", "rising"), [(40, 0.1, 4), (40, 10, 10), (7, 0.05, 0), (1, 0, 0)])
def test_warm_up_and_cosine_are_those_of_pytorch(steps: int, warmup: float, rising: int) -> None:
    ours, theirs = optimizer_of(0.3, 0.01), optimizer_of(0.3, 0.01)
    scheduler = hotloop.WarmupCosine(ours, steps, warmup=warmup)
    warm = LinearLR(theirs, 1 / (rising + 1), total_iters=max(rising, 1))
    falls = CosineAnnealingLR(theirs, steps - rising)
    composed = SequentialLR(theirs, [warm, falls], [rising]) if rising else falls
    if not rising:
        for group, rate in zip(theirs.param_groups, (0.3, 0.01), strict=True):
            group["lr"] = rate
    for step in range(steps + 1):
        rates = [[group["lr"] for group in each.param_groups] for each in (ours, theirs)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-9, abs=1e-15), step
        for each, schedule in ((ours, scheduler), (theirs, composed)):
            each.step()
            schedule.step()
    scheduler.step()
    assert [group["lr"] for group in ours.param_groups] == [0.0, 0.0], "it stays there"


def test_a_warm_up_may_end_above_zero() -> None:
    optimizer = optimizer_of(0.5)
    scheduler = hotloop.WarmupCosine(optimizer, 10, warmup=2, end=0.1)
    for _ in range(10):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"steps": 2.5}, {"warmup": 10}, {"warmup": -1}, {"end": 2}, {"steps": True}]
)
def test_a_warm_up_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match=next(iter(wrong))):
        hotloop.WarmupCosine(optimizer_of(0.5), **{"steps": 10, **wrong})


def loop_with(schedulers: Any, **options: Any) -> tuple[hotloop.Loop, torch.optim.Optimizer]:
    """`schedulers` makes them of an optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = schedulers(optimizer)
    loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", plan="plain", scheduler=scheduler, **options)
    return loop, optimizer


def test_a_run_longer_than_its_warm_up_and_cosine_is_refused() -> None:
    loop, _ = loop_with(lambda optimizer: hotloop.WarmupCosine(optimizer, 4))
    with pytest.raises(BadArgument, match=r"(?s)WarmupCosine ends after 4 steps.*WarmupCosine\(…, steps=6\)"):
        loop.fit(BATCHES, epochs=3, progress=False)
    loop.fit(BATCHES, epochs=2, progress=False)


def test_a_warm_up_is_resumed_and_may_grow_longer(tmp_path: Path) -> None:
    def run(epochs: int, steps: int, folder: Path) -> tuple[float, torch.Tensor]:
        loop, optimizer = loop_with(lambda optimizer: hotloop.WarmupCosine(optimizer, steps, warmup=2))
        loop.fit(BATCHES, epochs=epochs, progress=False, monitor=False, save=folder, resume=True)
        return optimizer.param_groups[0]["lr"], loop.model.weight.detach()

    whole = run(4, 8, tmp_path / "whole")
    run(2, 8, tmp_path / "parts")
    rate, weight = run(4, 8, tmp_path / "parts")
    assert (rate, weight.tolist()) == (whole[0], whole[1].tolist())
    assert run(6, 16, tmp_path / "parts")[0] == pytest.approx(0.1 * 0.5 * (1 + math.cos(math.pi * 10 / 14)))


def test_a_rhythm_that_is_none_is_refused() -> None:
    for wrong, words in (
        (lambda o: {"batch": ExponentialLR(o, 0.9)}, "schedulers for every 'batch'"),
        (lambda o: {"batch": None}, "schedulers for every 'batch'"),
        (lambda o: {"step": 3}, "an int"),
        (lambda o: ExponentialLR, "scheduler= with the class ExponentialLR"),
        (lambda o: o, "scheduler= with a SGD"),
        (lambda o: ExponentialLR(optimizer_of(0.1), 0.9), "of another optimizer"),
    ):
        with pytest.raises(BadArgument, match=words):
            loop_with(wrong)
    with pytest.raises(BadArgument, match="leave schedule= out"):
        loop_with(lambda o: {"step": ExponentialLR(o, 0.9)}, schedule="epoch")
