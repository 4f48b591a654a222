"""`Journal`: watches the hardware during a run, and writes the numbers of both to its logs."""

import time
import warnings
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Self

import torch

from hotloop.errors import PlanWarning
from hotloop.monitor.logs import Logged, Logs
from hotloop.monitor.watching import EVERY, Watching
from hotloop.records import Epoch, Load
from hotloop.training.gradients import GradientNorms


class Journal:
    """Watches the device of a run from a thread, and logs numbers of the run at the same rate.

    A log that cannot be opened is an error before the run begins; one that breaks later is told once and left alone.
    """

    def __init__(
        self,
        device: torch.device,
        step: Callable[[], int],
        *,
        monitor: bool,
        log: Logged,
        lr: Callable[[], object] | None = None,
        norms: GradientNorms | None = None,
    ) -> None:
        self._device, self._step, self._lr, self._monitor = device, step, lr, monitor
        self._norms = norms
        self._is_due = False  # whether the step that runs is logged
        self._logs = Logs(log)
        self._watching: Watching | None = None
        self._last = 0.0

    def __enter__(self) -> Self:
        self._logs.open()
        if self._monitor:
            log = None if self._logs.is_empty else self._logs
            self._watching = Watching(gpus=_gpus(self._device), log=log, step=self._step).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.stop()
        self._logs.close()
        if error is None:  # else a warning that is an error would take its place
            self._tell()

    @property
    def load(self) -> Load | None:
        """The load of the hardware so far; None without monitoring."""
        return None if self._watching is None else self._watching.load

    def before_step(self) -> None:
        """Call before a step; steps are logged at the rate of hardware samples."""
        if self._logs.is_empty or time.monotonic() - self._last < EVERY:
            return
        self._is_due, self._last = True, time.monotonic()
        if self._norms is not None:
            self._norms.ask()

    def stretch(self, loss: float | None, rate: float) -> None:
        """Log the latest known loss, items per second, learning rate and gradient norm."""
        if not self._is_due:
            return
        self._is_due = False
        if self._norms is not None:
            self._norms.note()
        self._write({"loss": loss, "items per second": rate} | self._rate_of_learning() | self._gradient_norms())

    def epoch(self, epoch: Epoch) -> None:
        """Log the record of an epoch."""
        numbers = {"epoch": float(epoch.number), "epoch/loss": epoch.loss} | self._gradient_norms()
        numbers |= {f"train/{name}": value for name, value in epoch.train_metrics.items()}
        self._write(numbers | {f"validation/{name}": value for name, value in epoch.metrics.items()})

    def _gradient_norms(self) -> dict[str, float]:
        return {} if self._norms is None else self._norms.read()

    def _rate_of_learning(self) -> dict[str, float | None]:
        rate = None if self._lr is None else self._lr()
        if isinstance(rate, torch.Tensor):
            return {"lr": float(rate)} if rate.device.type == "cpu" else {}  # to read it would synchronize
        return {"lr": float(rate)} if isinstance(rate, int | float) else {}

    def _write(self, numbers: Mapping[str, float | None]) -> None:
        self._logs.write(numbers, step=self._step())
        self._tell()

    def _tell(self) -> None:
        """Warn of logs that broke; in the thread of the training, where a warning may be an error."""
        for what, error in self._logs.failures():
            warnings.warn(f"{what}: {error}", PlanWarning, stacklevel=5)


def _gpus(device: torch.device) -> Collection[int | str]:
    """The GPU of a run: by its UUID, since CUDA may count GPUs in another order than the driver does."""
    if device.type == "cuda":
        return [str(torch.cuda.get_device_properties(device).uuid)]
    return [0] if device.type == "mps" else []
