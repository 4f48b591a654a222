"""Schedules: a plateau is given what it watches, and one that nobody steps is told of."""

import warnings
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import hotloop
from hotloop.errors import PlanWarning

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
