"""How fast a training loop is: as tutorials write it, and as `fit` trains it; warmed up, synchronized and repeated."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, Self

import torch
from torch import nn

from hotloop.device.clock import synchronize
from hotloop.levers.applied import displace_plans
from hotloop.objective.objectives import autocast, items_in, losses_of
from hotloop.placement import move
from hotloop.plan import Plan
from hotloop.records import Record, Report
from hotloop.step.trained_objectives import TrainedObjective, needs_closure

Way = Literal["tutorial", "fit"]
Run = Callable[[float], tuple[int, float]]  # train for about so many seconds: the items, and the seconds they took
REPEATS = 3
WARMUP = 0.5  # of the time: the default tries its plan meanwhile


@dataclass(frozen=True)
class LoopPace(Record):
    """A training loop on a device: items per second."""

    device: str
    way: Way
    rates: tuple[float, ...] = ()  # of the repeats; empty where it failed
    plan: tuple[str, ...] = ()  # the precision and the levers in use
    failure: str = ""

    @property
    def rate(self) -> float | None:
        """The median; None where it failed."""
        return median(self.rates) if self.rates else None

    def times(self, other: Self | None) -> float | None:
        """How many times as fast as another one; None where one of them failed."""
        return None if other is None or not self.rate or not other.rate else self.rate / other.rate


def timed(run: Run, seconds: float) -> tuple[float, ...]:
    """Items per second of each repeat, after a warm-up; all of it within about so many seconds."""
    start = time.perf_counter()
    while (left := WARMUP * seconds - (time.perf_counter() - start)) > 0:
        run(left)
    done = [run((1 - WARMUP) * seconds / REPEATS) for _ in range(REPEATS)]
    return tuple(items / taken for items, taken in done)


class TutorialLoop:
    """The loop as tutorials write it: batch to the device, `zero_grad`, forward, `backward`, `step`.

    It reads no loss, so nothing waits for the device. Of the plan it has what a person asks for: the precision,
    accumulation and clipping.
    """

    def __init__(
        self,
        model: nn.Module,
        objectives: Sequence[TrainedObjective],
        loader: Iterable[Any],
        plan: Plan,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self._model, self._objectives, self._loader, self._transform = model, objectives, loader, transform
        self._device, self._plan = torch.device(plan.device), plan
        self._autocast = autocast(self._device, plan.precision)
        self._batches = self._epochs()
        displace_plans(model, [optimizer for each in objectives for optimizer in each.optimizers])

    def run(self, seconds: float) -> tuple[int, float]:
        """Train for so many seconds, at least one batch."""
        synchronize(self._device)
        start, items = time.perf_counter(), 0
        while not items or time.perf_counter() - start < seconds:
            items += next(self._batches)
        synchronize(self._device)
        return items, time.perf_counter() - start

    def _epochs(self) -> Iterator[int]:
        """The items of each batch, which it has trained on."""
        self._model.train()
        while True:
            for number, loaded in enumerate(self._loader):
                batch = move(loaded, self._device)
                if self._transform is not None:
                    batch = self._transform(batch)
                for trained in self._objectives:
                    if number // self._plan.accumulate % trained.every == 0:
                        self._train(trained, batch, number % self._plan.accumulate)
                yield items_in(batch)

    def _train(self, trained: TrainedObjective, batch: Any, place: int) -> None:
        """One batch of a window, in its place there."""
        plan = self._plan

        def backward() -> Any:
            if place == 0:
                for optimizer in trained.optimizers:
                    optimizer.zero_grad()
            with self._autocast:
                loss = losses_of(trained.objective, self._model, batch, trained.name).total / plan.accumulate
            loss.backward()
            return loss

        if needs_closure(trained.optimizers[0]):
            trained.optimizers[0].step(backward)
            return
        backward()
        if place + 1 < plan.accumulate:
            return
        if plan.clip_norm is not None:
            nn.utils.clip_grad_norm_(trained.parameters, plan.clip_norm)
        if plan.clip_value is not None:
            nn.utils.clip_grad_value_(trained.parameters, plan.clip_value)
        for optimizer in trained.optimizers:
            optimizer.step()


class FittedLoop:
    """`fit` on a loader, again and again; `last` is the latest report.

    Each run is as long as its time: `fit` plans for it, and a plan stays from one to the next.
    """

    last: Report

    def __init__(self, fit: Callable[..., Report]) -> None:
        self._fit = fit
        self._epoch = math.inf  # seconds of one

    def run(self, seconds: float) -> tuple[int, float]:
        """Train for so many seconds, at least one batch; those in which plans were tried count."""
        epochs = 1 if math.isinf(self._epoch) else max(1, math.ceil(seconds / self._epoch))
        self.last = report = self._fit(epochs=epochs, time_limit=seconds)
        if report.stopped == "Ctrl-C":  # `fit` has ended well, and the rest shall not begin
            raise KeyboardInterrupt
        if report.epochs and not report.interrupted:
            self._epoch = min(each.seconds for each in report.epochs)
        return sum(each.items for each in report.epochs), sum(each.seconds for each in report.epochs)
