"""The hardware and the numbers of a run, watched while it trains and written to its logs."""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hotloop.errors import PlanWarning
from hotloop.monitor.logs import EVERY, Logs, targets_of
from hotloop.records import Epoch
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part
from hotloop.step.norms import NormReader

if TYPE_CHECKING:
    from hotloop.monitor.watching import Watching


class Journal(Part):
    """Watches the device of a run from a thread, and logs numbers of the run at the same rate.

    A log that cannot be opened is an error before the run begins; one that breaks later is told once and left alone.
    """

    name = "journal"
    after = ("signals",)

    def __init__(self, run: TrainingRun, asked: FitArguments) -> None:
        super().__init__(run, asked)
        self._monitor = asked.monitor
        self._logs = Logs(asked.log)
        self._norms = NormReader(run.core.switch)  # before clipping; they may be one entry behind
        self._watching: Watching | None = None
        self._is_due = False  # whether the step that runs is logged
        self._last = 0.0
        if not targets_of(asked.log):
            self.idle = ("before_step", "after_step")

    @contextmanager
    def around(self) -> Iterator[None]:
        self._logs.open()
        if self._monitor:
            from hotloop.monitor.watching import Watching  # noqa: PLC0415

            log = None if self._logs.is_empty else self._logs
            gpus = self.run.core.subject.backend.monitor_ids()
            self._watching = Watching(gpus=gpus, log=log, step=self._step).start()
        try:
            yield
        finally:
            if self._watching is not None:
                self._watching.stop()
            self._logs.close()
        self._tell()  # not after an error, whose place a warning that is an error would take

    def before_step(self, batches: int) -> None:
        """Steps are logged at the rate of hardware samples."""
        if time.monotonic() - self._last < EVERY:
            return
        self._is_due, self._last = True, time.monotonic()
        self._norms.ask()

    def after_step(self, loss: Tensor | None, batches: int) -> None:
        """Log the latest known loss, items per second, learning rate and gradient norm."""
        if self._is_due:
            self._is_due = False
            self._norms.note()
            numbers = {"loss": self.run.core.watch.latest, "items per second": self.run.rate}
            self._write(numbers | self._rate_of_learning() | self._gradient_norms())

    def epoch_known(self, epoch: Epoch) -> None:
        numbers = {"epoch": float(epoch.number), "epoch/loss": epoch.loss} | self._gradient_norms()
        numbers |= {f"train/{name}": value for name, value in epoch.train_metrics.items()}
        self._write(numbers | {f"validation/{name}": value for name, value in epoch.metrics.items()})

    def report(self) -> Mapping[str, Any]:
        return {"load": None if self._watching is None else self._watching.load}

    def _step(self) -> int:
        return self.run.loop.steps

    def _gradient_norms(self) -> dict[str, float]:
        is_alone = len(self.run.core.subject.objectives) == 1
        norms = self._norms.read()
        return {"gradient norm" if is_alone else f"gradient norm/{name}": norm for name, norm in norms.items()}

    def _rate_of_learning(self) -> dict[str, float | None]:
        rate = self.run.loop.optimizers[0].param_groups[0]["lr"]
        if isinstance(rate, Tensor) and not rate.is_cpu:
            return {}  # to read it would synchronize
        return {"lr": float(rate)} if isinstance(rate, int | float | Tensor) else {}

    def _write(self, numbers: Mapping[str, float | None]) -> None:
        self._logs.write(numbers, step=self._step())
        self._tell()

    def _tell(self) -> None:
        """Warn of logs that broke; in the thread of the training, where a warning may be an error."""
        for what, error in self._logs.failures():
            warnings.warn(f"{what}: {error}", PlanWarning, stacklevel=5)
