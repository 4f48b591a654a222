"""The whole of a training run around `Loop.step`: epochs, evaluation, progress, Ctrl-C, and the report of it all."""

import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from hotloop.clock import synchronize
from hotloop.evaluation import Metrics
from hotloop.loop.progress import Display, Stop
from hotloop.loop.update import Schedule
from hotloop.loop.watch import Watch
from hotloop.objective import items_in
from hotloop.records import Epoch, Report

if TYPE_CHECKING:
    from hotloop.loop.loop import Loop


@dataclass
class Fit:
    """A run in progress."""

    loop: "Loop"
    watch: Watch
    schedule: Schedule
    stop: Stop = field(default_factory=Stop)
    epochs: list[Epoch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._started = datetime.now(UTC)
        self._clock = time.perf_counter()
        self._before = (self.loop.steps, self.loop.skipped, self.watch.batches)
        if self.loop.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.loop.device)

    def run(
        self,
        batches: Callable[[], Iterable[Any]],
        length: int | None,
        epochs: int,
        validate: Iterable[Any] | None,
        metrics: Metrics | None,
        progress: bool | None,
    ) -> Report:
        """Train, evaluate after each epoch, and report what was measured."""
        with self.stop.listening(), Display(epochs, length, progress) as display:
            for number in range(1, epochs + 1):
                seconds = self._train(number, batches(), display)
                means = self.watch.means()
                if not means:
                    break  # stopped before the first batch
                done = self._evaluated(number, means, seconds, validate, metrics)
                self.epochs.append(done)
                display.epoch(done)
                if self.stop.asked:
                    break
        return self._report()

    def _train(self, number: int, batches: Iterable[Any], display: Display) -> float:
        """One epoch; the seconds that it took."""
        start = time.perf_counter()
        items = 0
        try:
            for batch in batches:
                self.loop.step(batch)
                items += items_in(batch)
                display.batch(number, self.watch.latest, items / (time.perf_counter() - start))
                if self.stop.asked:
                    break
        except (KeyboardInterrupt, RuntimeError):
            if not self.stop.asked:  # Ctrl-C also reaches the loader's workers, and the loader then complains of them
                raise
        synchronize(self.loop.device)
        return time.perf_counter() - start

    def _evaluated(
        self,
        number: int,
        means: dict[str, float],
        seconds: float,
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
            items=int(self.watch.items),
            seconds=seconds,
            losses=means if len(means) > 1 else {},
            metrics=scores,
        )

    def _report(self) -> Report:
        loop = self.loop
        steps, skipped, first = self._before
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
        )
