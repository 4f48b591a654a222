"""The whole of a training run around `Loop.step`: epochs, evaluation, progress, Ctrl-C, and the report of it all."""

import platform
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from hotloop.clock import Clock
from hotloop.evaluation import Metrics
from hotloop.levers import levers_of
from hotloop.loop.progress import Display, Stop
from hotloop.loop.tuner import Tuner
from hotloop.loop.update import Schedule
from hotloop.loop.watch import Ending, Watch
from hotloop.records import Epoch, Report

if TYPE_CHECKING:
    from hotloop.loop.loop import Loop


@dataclass
class Fit:
    """A run in progress."""

    loop: "Loop"
    watch: Watch
    schedule: Schedule
    tuner: Tuner
    stop: Stop = field(default_factory=Stop)
    epochs: list[Epoch] = field(default_factory=list)
    display: Display = field(init=False)
    _pending: "deque[tuple[int, Ending, Clock, Any]]" = field(
        default_factory=deque
    )  # epochs whose losses are under way

    def __post_init__(self) -> None:
        self._started = datetime.now(UTC)
        self._clock = time.perf_counter()
        self._tuned_before = self.tuner.seconds
        self._before = (self.loop.steps, self.loop.skipped, self.watch.batches, self.loop.out_of_memory)
        if self.loop.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.loop.device)

    def run(
        self,
        epoch: Callable[[], Iterable[tuple[int, int]]],
        length: int | None,
        epochs: int,
        validate: Iterable[Any] | None,
        metrics: Metrics | None,
        progress: bool | None,
    ) -> Report:
        """Train, evaluate after each epoch, and report what was measured; `epoch` gives batches and items."""
        wait = validate is not None or self.loop.device.type != "cuda" or self.schedule.watches_a_metric
        with self.stop.listening(), Display(epochs, length, progress) as display:
            self.display = self.tuner.display = display
            for number in range(1, epochs + 1):
                clock = Clock(self.loop.device)
                self._train(number, epoch())
                if not self.watch.items_seen:
                    break  # stopped before the first batch
                self._pending.append((number, self.watch.end_epoch(), clock, clock.lap()))
                self._finish(validate, metrics, wait=wait)
                if self.stop.asked:
                    break
            self._finish(validate, metrics, wait=True)
        self.tuner.display = None
        return self._report()

    def _train(self, number: int, stretches: Iterable[tuple[int, int]]) -> None:
        """One epoch."""
        start = time.perf_counter()
        done = 0
        try:
            for batches, items in stretches:
                done += items
                self.display.stretch(batches, number, self.watch.latest, done / (time.perf_counter() - start))
                if self.stop.asked:
                    break
        except (KeyboardInterrupt, RuntimeError):
            if not self.stop.asked:  # Ctrl-C also reaches the loader's workers, and the loader then complains of them
                raise

    def _finish(self, validate: Iterable[Any] | None, metrics: Metrics | None, *, wait: bool) -> None:
        """Note the epochs whose losses have come from the device; short epochs go on meanwhile."""
        while self._pending and (wait or self._pending[0][1].landed()):
            number, ending, clock, end = self._pending.popleft()
            means = ending.means()
            done = self._evaluated(number, means, clock.seconds(end), int(ending.items), validate, metrics)
            self.epochs.append(done)
            self.display.epoch(done)

    def _evaluated(
        self,
        number: int,
        means: dict[str, float],
        seconds: float,
        items: int,
        validate: Iterable[Any] | None,
        metrics: Metrics | None,
    ) -> Epoch:
        loss = sum(means.values())
        scores: dict[str, float] = {}
        if validate is not None and not self.stop.asked:
            try:
                with self.stop.at_once():
                    scores = self.loop.evaluate(validate, metrics)
            except KeyboardInterrupt:
                self.stop.asked = True
        if not self.stop.asked:
            self.schedule.after_evaluation(scores.get("loss", loss))
        return Epoch(
            number=number,
            loss=loss,
            items=items,
            seconds=seconds,
            losses=means if len(means) > 1 else {},
            metrics=scores,
        )

    def _report(self) -> Report:
        loop = self.loop
        steps, skipped, first, failures = self._before
        on_gpu = loop.device.type == "cuda"
        return Report(
            device=str(loop.device),
            device_name=loop.choice.name,
            reason=loop.choice.reason,
            precision=loop.plan.precision,
            parameters=sum(p.numel() for p in loop.model.parameters()),
            started=self._started.isoformat(timespec="seconds"),
            seconds=time.perf_counter() - self._clock,
            steps=loop.steps - steps,
            skipped=loop.skipped - skipped,
            interrupted=self.stop.asked,
            epochs=tuple(self.epochs),
            curve=tuple((batch - first, loss) for batch, loss in self.watch.curve if batch > first),
            peak_memory=torch.cuda.max_memory_allocated(loop.device) if on_gpu else None,
            versions={"python": platform.python_version(), "torch": torch.__version__},
            levers=tuple(levers_of(loop.plan)),
            tuning=self.tuner.seconds - self._tuned_before,
            out_of_memory=loop.out_of_memory - failures,
            micro_batch=loop.plan.micro_batch,
        )
