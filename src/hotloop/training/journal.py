"""`Journal`: the hardware watched while a run goes on, and the numbers of both written to a log."""

import os
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Self

import torch

from hotloop.errors import HotloopError, PlanWarning
from hotloop.monitor.logs import Log, open_log
from hotloop.monitor.watching import EVERY, Watching
from hotloop.records import Epoch, Load

Logged = Log | str | os.PathLike[str] | None


class Journal:
    """Watches the device of a run from a thread, and writes what it is told, as often as that samples.

    A log that cannot be opened is an error before the run begins; one that breaks later is told once and left alone.
    """

    def __init__(self, device: torch.device, step: Callable[[], int], *, monitor: bool, log: Logged) -> None:
        self._device, self._step, self._monitor, self._given = device, step, monitor, log
        self._log: Log | None = None
        self._watching: Watching | None = None
        self._last = 0.0

    def __enter__(self) -> Self:
        self._log = open_log(self._given) if isinstance(self._given, str | os.PathLike) else self._given
        if self._monitor:
            self._watching = Watching(gpus=_gpus(self._device), log=self._log, step=self._step).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.stop()
        if self._log is not None and self._log is not self._given:
            self._log.close()

    @property
    def load(self) -> Load | None:
        """What was asked of the hardware so far; None where nobody looks."""
        return None if self._watching is None else self._watching.load

    def stretch(self, loss: float | None, rate: float) -> None:
        """Note the loss as far as it is known, and the items per second; not more often than the hardware."""
        if self._log is None or time.monotonic() - self._last < EVERY:
            return
        self._last = time.monotonic()
        self._write({"loss": loss, "items per second": rate})

    def epoch(self, epoch: Epoch) -> None:
        """Note what an epoch gave."""
        numbers = {"epoch": float(epoch.number), "epoch/loss": epoch.loss}
        self._write(numbers | {f"validation/{name}": value for name, value in epoch.metrics.items()})

    def _write(self, numbers: Mapping[str, float | None]) -> None:
        if self._log is None:
            return
        try:
            self._log.write(numbers, step=self._step())
        except (OSError, HotloopError, ValueError) as error:
            self._log = None
            warnings.warn(f"the log is not written any more: {error}", PlanWarning, stacklevel=4)


def _gpus(device: torch.device) -> Collection[int | str]:
    """The GPU of a run: by its UUID, since CUDA may count GPUs in another order than the driver does."""
    if device.type == "cuda":
        return [str(torch.cuda.get_device_properties(device).uuid)]
    return [0] if device.type == "mps" else []
