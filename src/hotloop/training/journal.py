"""`Journal`: the hardware watched while a run goes on, and the numbers of both written to its logs."""

import os
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from hotloop.errors import BadArgument, PlanWarning
from hotloop.monitor.logs import Log, open_log
from hotloop.monitor.watching import EVERY, Watching
from hotloop.records import Epoch, Load
from hotloop.text import an
from hotloop.training.gradients import GradientNorms

LogTarget = Log | str | os.PathLike[str]
Logged = LogTarget | Sequence[LogTarget] | None


class Journal:
    """Watches the device of a run from a thread, and writes what it is told, as often as that samples.

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
        self._logs = _Logs(targets_of(log))
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
            self._logs.tell()

    @property
    def load(self) -> Load | None:
        """What was asked of the hardware so far; None where nobody looks."""
        return None if self._watching is None else self._watching.load

    def before_step(self) -> None:
        """A step follows; those that are logged are as seldom as looks at the hardware."""
        if self._logs.is_empty or time.monotonic() - self._last < EVERY:
            return
        self._is_due, self._last = True, time.monotonic()
        if self._norms is not None:
            self._norms.ask()

    def stretch(self, loss: float | None, rate: float) -> None:
        """Note the loss as far as it is known, items per second, learning rate and the norm of the gradient."""
        if not self._is_due:
            return
        self._is_due = False
        if self._norms is not None:
            self._norms.note()
        self._write({"loss": loss, "items per second": rate} | self._rate_of_learning() | self._gradient_norms())

    def epoch(self, epoch: Epoch) -> None:
        """Note what an epoch gave."""
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
        self._logs.tell()


class _Logs:
    """The logs of a run as one. One that breaks is left out from then on, whichever thread found it, and told once."""

    def __init__(self, targets: Sequence[LogTarget]) -> None:
        self._targets = targets
        self._open: tuple[Log, ...] = ()
        self._own: list[Log] = []
        self._untold: list[str] = []

    @property
    def is_empty(self) -> bool:
        return not self._open

    def open(self) -> None:
        """Open all of them, or none."""
        with ExitStack() as undo:
            for target in self._targets:
                log = target
                if isinstance(log, str | os.PathLike):
                    log = open_log(log)
                    undo.callback(log.close)
                    self._own.append(log)
                self._open += (log,)
            undo.pop_all()

    def write(self, numbers: Mapping[str, float | None], *, step: int, time: float | None = None) -> None:
        for log in self._open:
            try:
                log.write(numbers, step=step, time=time)
            except Exception as error:  # noqa: BLE001  # every logger has its own, and the training is not at fault
                if any(each is log for each in self._open):  # else the other thread has found it too
                    self._open = tuple(each for each in self._open if each is not log)
                    self._untold.append(f"the log is not written any more: {error}")

    def close(self) -> None:
        """Close those that were opened here; whoever made another closes it."""
        working, self._open = self._open, ()
        for log in self._own:
            try:
                log.close()
            except Exception as error:  # noqa: BLE001  # the same: the report of the run is not lost for it
                if any(each is log for each in working):  # else it was told of before
                    self._untold.append(f"the log was not closed: {error}")

    def tell(self) -> None:
        """Warn of what went wrong; in the thread of the training, where a warning may be an error."""
        while self._untold:
            warnings.warn(self._untold.pop(0), PlanWarning, stacklevel=5)


def targets_of(log: Logged) -> list[LogTarget]:
    """One log or several, checked."""
    several: list[Any] = [] if log is None else list(log) if isinstance(log, list | tuple) else [log]
    for each in several:
        if isinstance(each, str | os.PathLike):
            continue
        if not callable(getattr(each, "write", None)) or not callable(getattr(each, "close", None)):
            raise BadArgument(
                f"log= with {an(type(each).__name__)}, which has no `write` and `close`",
                fix='give "tensorboard", "run.jsonl", "run.csv", "wandb", "mlflow", a Log, or a list of these',
            )
    return several


def _gpus(device: torch.device) -> Collection[int | str]:
    """The GPU of a run: by its UUID, since CUDA may count GPUs in another order than the driver does."""
    if device.type == "cuda":
        return [str(torch.cuda.get_device_properties(device).uuid)]
    return [0] if device.type == "mps" else []
