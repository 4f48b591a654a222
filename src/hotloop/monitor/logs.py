"""Logs: the numbers of a run and of its hardware, step by step, in files or for tools that show them."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from numbers import Real
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from hotloop.errors import BadArgument, HotloopError, OutputError
from hotloop.printing.text import an, printable
from hotloop.records.files import cannot_write, finite

RESERVED = ("time", "step")
EVERY = 0.5  # seconds between two entries, and between two samples of the hardware
FLUSH_EVERY = 10  # seconds until TensorBoard's file is up to date
MLFLOW_BATCH = 1000  # numbers that MLflow takes in one request
PACKAGES = {"wandb": ("Weights & Biases", "init"), "mlflow": ("MLflow", "start_run")}  # its title, and what it has


class MissingLogger(HotloopError, ImportError):
    """A package that a log needs is not installed."""


class Log(Protocol):
    """Takes plain numbers by name, such as `loss` or `gpu0/utilisation`."""

    def write(self, numbers: Mapping[str, float | None], *, step: int, time: float | None = None) -> None:
        """Note numbers at a step and a time in seconds since 1970, which is now where it is not given."""

    def close(self) -> None: ...


LogTarget = Log | str | os.PathLike[str]
Logged = LogTarget | Sequence[LogTarget] | None


class JsonLines:
    """A log of one JSON object per line, which is in the file as soon as it is written.

    Lines go to the end of the file in one piece each, so that several writers may share one, and a crash costs at most
    the line that was being written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            if not _ends_whole(self.path):  # somebody's half line must not spoil the next one
                self._file.write(b"\n")
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def write(self, numbers: Mapping[str, float | None], *, step: int, time: float | None = None) -> None:
        """Note numbers; those that are not known or not finite become null."""
        line = finite({"time": _now(time), "step": step, **_checked(numbers)})
        data = json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            if self._file.write(data) < len(data):
                raise OSError("the disk is full")
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """A log that `tensorboard --logdir FOLDER` shows."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            writer = import_module("torch.utils.tensorboard").FileWriter
            self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        except ImportError as error:
            raise MissingLogger(
                f"TensorBoard cannot be used: {printable(str(error))}", fix="pip install tensorboard"
            ) from error
        try:
            self._writer = writer(str(self.folder), flush_secs=FLUSH_EVERY)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def write(self, numbers: Mapping[str, float | None], *, step: int, time: float | None = None) -> None:
        """Note numbers; those that are not known are left out."""
        # All of them in one event: a call for each would cost ten times as much.
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in _known(numbers).items()]
        if values:
            self._writer.add_summary(self._summary(value=values), step, _now(time))

    def close(self) -> None:
        """Bring the file up to date and close it."""
        self._writer.close()


class WeightsAndBiases:
    """A log that Weights & Biases shows: in the program's own run where one is active, else in a new one.

    `options` are those of `wandb.init`. Without a server, `WANDB_MODE=offline` keeps everything in `wandb/`.
    """

    def __init__(self, **options: Any) -> None:
        wandb = _package("wandb")
        self._own = wandb.run is None
        with _beginning("Weights & Biases", "`wandb login`, or set WANDB_MODE=offline"):
            self._run = wandb.init(**options) if self._own else wandb.run
            # W&B drops what comes with an earlier step than its own, and readings come from another thread: the step
            # is a number like the others, and the axis of all of them.
            self._run.define_metric("*", step_metric="step")
        self._lock = Lock()

    def write(self, numbers: Mapping[str, float | None], *, step: int, time: float | None = None) -> None:
        """Note numbers; those that are not known are left out. W&B notes the time itself."""
        if known := _known(numbers):
            with self._lock:
                self._run.log({**known, "step": step})

    def close(self) -> None:
        """End the run where the log began it; this waits for what is not uploaded yet."""
        if self._own:
            self._run.finish()


class MLflow:
    """A log that MLflow shows: in the program's own run where one is active, else in a new one.

    `options` are those of `mlflow.start_run`; MLFLOW_TRACKING_URI says where. A thread sends the numbers, so that
    training does not wait for the server; what it could not send is an error of the next `write`, or of `close`.
    """

    def __init__(self, **options: Any) -> None:
        self._mlflow = _package("mlflow")
        self._metric = import_module("mlflow.entities").Metric
        with _beginning("MLflow", "see that the server of MLFLOW_TRACKING_URI answers"):
            self._client = import_module("mlflow.tracking").MlflowClient()
            active = self._mlflow.active_run()
            self._own = active is None
            self.run_id: str = (self._mlflow.start_run(**options) if active is None else active).info.run_id
        self._waiting: list[Any] = []
        self._lock = Lock()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="hotloop mlflow")
        self._sending: Future[None] | None = None

    def write(self, numbers: Mapping[str, float | None], *, step: int, time: float | None = None) -> None:
        """Note numbers; those that are not known are left out."""
        milliseconds = int(_now(time) * 1000)
        known = _known(numbers).items()
        metrics = [self._metric(_mlflow_name(name), value, milliseconds, step) for name, value in known]
        with self._lock:
            self._waiting += metrics
            if self._sending is None or self._sending.done():
                done, self._sending = self._sending, None
                if done is not None:
                    done.result()  # which may have failed
                self._sending = self._sender.submit(self._send)

    def close(self) -> None:
        """Send what waits, and end the run where the log began it."""
        try:
            self._sender.shutdown()
            if self._sending is not None:
                self._sending.result()
            self._send()
        finally:
            if self._own:
                self._end()

    def _send(self) -> None:
        with self._lock:
            metrics, self._waiting = self._waiting, []
        for first in range(0, len(metrics), MLFLOW_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + MLFLOW_BATCH])

    def _end(self) -> None:
        active = self._mlflow.active_run()  # of this thread, which need not be the one that began it
        if active is not None and active.info.run_id == self.run_id:
            self._mlflow.end_run()
        else:
            self._client.set_terminated(self.run_id)


LOGGERS: dict[str, Callable[[], Log]] = {
    "tensorboard": lambda: TensorBoard(Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S")),
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def open_log(where: str | os.PathLike[str]) -> Log:
    """The log that a person means: one of `LOGGERS`, or a path that ends in `.jsonl`."""
    if isinstance(where, str) and where in LOGGERS:
        return LOGGERS[where]()
    if Path(where).suffix == ".jsonl":
        return JsonLines(where)
    raise BadArgument(
        f"log={printable(str(where))!r} is neither a logger's name nor a path that ends in .jsonl",
        fix=f"choose one of: {', '.join(LOGGERS)}, run.jsonl; or give hotloop.monitor.logs.TensorBoard(folder)",
    )


def try_log(where: Log | str | os.PathLike[str], folder: Path, numbers: Mapping[str, float | None]) -> None:
    """Write an entry as a run would, into a folder that is thrown away.

    W&B and MLflow are only looked for, since nothing can be taken back there; a `Log` of the person's is left alone.
    """
    if isinstance(where, str) and where in PACKAGES:
        _package(where)
    elif isinstance(where, str | os.PathLike):
        log: Log = TensorBoard(folder) if where == "tensorboard" else open_log(folder / Path(where).name)
        try:
            log.write(numbers, step=0)
        finally:
            log.close()


class Logs:
    """One log or several as one. One that breaks is left out from then on, whichever thread found it."""

    def __init__(self, log: Logged) -> None:
        self._targets = targets_of(log)
        self._open: tuple[Log, ...] = ()
        self._own: list[Log] = []
        self._failures: list[tuple[str, Exception]] = []

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
                    self._failures.append(("the log is not written any more", error))

    def close(self) -> None:
        """Close those that were opened here; whoever made another closes it."""
        working, self._open = self._open, ()
        for log in self._own:
            try:
                log.close()
            except Exception as error:  # noqa: BLE001  # the same: the report of the run is not lost for it
                if any(each is log for each in working):  # else it was told of before
                    self._failures.append(("the log was not closed", error))

    def failures(self) -> Iterator[tuple[str, Exception]]:
        """What went wrong since this was last asked: in words, and the error."""
        while self._failures:
            yield self._failures.pop(0)


def targets_of(log: Logged) -> list[LogTarget]:
    """One log or several, checked."""
    several: list[Any] = [] if log is None else list(log) if isinstance(log, list | tuple) else [log]
    for each in several:
        if isinstance(each, str | os.PathLike):
            continue
        if not callable(getattr(each, "write", None)) or not callable(getattr(each, "close", None)):
            raise BadArgument(
                f"log= with {an(type(each).__name__)}, which has no `write` and `close`",
                fix='give "tensorboard", "run.jsonl", "wandb", "mlflow", a Log, or a list of these',
            )
    return several


def _checked(numbers: Mapping[str, float | None]) -> dict[str, float | None]:
    for name, value in numbers.items():
        if name in RESERVED:
            raise BadArgument(
                f"a number named {name!r} cannot be logged", fix="every entry has its time and step already"
            )
        if value is not None and not isinstance(value, Real):
            raise BadArgument(
                f"{printable(name)} is {an(type(value).__name__)}, and a log takes plain numbers",
                fix="of a tensor, log `.item()`, which waits for the device: not in every step",
            )
    return {name: value if value is None or isinstance(value, int) else float(value) for name, value in numbers.items()}


def _known(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in _checked(numbers).items() if value is not None}


def _package(name: str) -> Any:
    """A package that a log needs, or the line that installs it."""
    title, function = PACKAGES[name]
    try:
        package = import_module(name)
        getattr(package, function)  # which a folder of that name, such as the one that W&B makes, does not have
    except (ImportError, AttributeError) as error:
        raise MissingLogger(f"{title} cannot be used: {printable(str(error))}", fix=f"pip install {name}") from error
    return package


@contextmanager
def _beginning(title: str, fix: str) -> Iterator[None]:
    """Say it in one way where a logger cannot begin; each has errors of its own."""
    try:
        yield
    except Exception as error:
        raise OutputError(f"{title} did not begin: {type(error).__name__}: {printable(str(error))}", fix=fix) from error


def _mlflow_name(name: str) -> str:
    """A name as MLflow allows it. Its file store keeps each in a file, so that `epoch` must not be a folder too.

    >>> _mlflow_name("validation/top@5"), _mlflow_name("epoch")
    ('validation/top_5', 'epoch/number')
    """
    return "epoch/number" if name == "epoch" else re.sub(r"[^\w\-. /]", "_", name)


def _now(given: float | None) -> float:
    return time.time() if given is None else given


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
