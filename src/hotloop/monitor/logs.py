"""Logs: the numbers of a run and of its hardware, step by step, as lines of JSON or for TensorBoard."""

import json
import os
import time
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from numbers import Real
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from hotloop.errors import BadArgument, HotloopError, OutputError
from hotloop.files import finite
from hotloop.monitor.history import GPU_FIELDS, HOST_FIELDS
from hotloop.monitor.load import is_among
from hotloop.monitor.reading import Reading
from hotloop.text import an, printable

RESERVED = ("time", "step")
FLUSH_EVERY = 10  # seconds until TensorBoard's file is up to date


class MissingTensorBoard(HotloopError, ImportError):
    """TensorBoard is not installed."""


class Log(Protocol):
    """Takes plain numbers by name, such as `loss` or `gpu0/utilisation`."""

    def write(self, numbers: Mapping[str, float | None], *, step: int, time: float | None = None) -> None:
        """Note numbers at a step and a time in seconds since 1970, which is now where it is not given."""

    def close(self) -> None: ...


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
            self._whole = _ends_whole(self.path)
        except OSError as error:
            raise self._cannot(error) from error
        self._lock = Lock()

    def write(self, numbers: Mapping[str, float | None], *, step: int, time: float | None = None) -> None:
        """Note numbers; those that are not known or not finite become null."""
        self.append({"time": _now(time), "step": step, **_checked(numbers)})

    def append(self, data: Mapping[str, Any]) -> None:
        """Write any JSON object as a line, such as a whole reading's `to_json()`."""
        line = json.dumps(finite(dict(data)), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if not self._whole:  # somebody's half line, which must not spoil this one
                line = b"\n" + line
            self._whole = False
            try:
                self._whole = self._file.write(line) == len(line)
            except OSError as error:
                raise self._cannot(error) from error
            if not self._whole:
                raise self._cannot(OSError("the disk is full"))

    def close(self) -> None:
        self._file.close()

    def _cannot(self, error: OSError) -> OutputError:
        return OutputError(
            f"cannot write {printable(str(self.path))}: {error.strerror or error}",
            fix="choose a place that you may write to, with enough space",
        )


class TensorBoard:
    """A log that `tensorboard --logdir FOLDER` shows."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            writer = import_module("torch.utils.tensorboard").FileWriter
            self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        except ImportError as error:
            raise MissingTensorBoard(
                f"TensorBoard cannot be used: {printable(str(error))}", fix="pip install tensorboard"
            ) from error
        try:
            self._writer = writer(str(self.folder), flush_secs=FLUSH_EVERY)
        except OSError as error:
            raise OutputError(
                f"cannot write to {printable(str(self.folder))}: {error.strerror or error}",
                fix="choose a folder that you may write to",
            ) from error

    def write(self, numbers: Mapping[str, float | None], *, step: int, time: float | None = None) -> None:
        """Note numbers; those that are not known are left out."""
        # All of them in one event: a call for each would cost ten times as much.
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in _checked(numbers).items()
            if value is not None
        ]
        if values:
            self._writer.add_summary(self._summary(value=values), step, _now(time))

    def close(self) -> None:
        """Bring the file up to date and close it."""
        self._writer.close()


def open_log(where: str | os.PathLike[str]) -> Log:
    """The log that a person means: `tensorboard`, in a new folder under `runs`, or a path that ends in `.jsonl`."""
    if where == "tensorboard":
        return TensorBoard(Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S"))
    if Path(where).suffix in (".jsonl", ".json", ".ndjson"):
        return JsonLines(where)
    raise BadArgument(
        f"log={printable(str(where))!r} is neither `tensorboard` nor a file of JSON lines",
        fix='log="tensorboard", log="run.jsonl", or hotloop.monitor.logs.TensorBoard(folder)',
    )


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; lines that a crash has cut are left out."""
    found, cut = False, 0
    try:
        with Path(path).open("rb") as file:
            for line in file:
                try:
                    data = json.loads(line)
                except (ValueError, RecursionError):
                    data = None
                if isinstance(data, dict):
                    found = True
                    yield data
                elif line.strip():
                    cut += 1
    except OSError as error:
        raise BadArgument(
            f"cannot read {printable(str(path))}: {error.strerror or error}", fix="give the path of a log"
        ) from error
    if cut > 1 and not found:
        raise BadArgument(f"{printable(str(path))} holds no JSON lines", fix="give the path of a log")


def scalars(reading: Reading, gpus: Collection[int | str] | None = None) -> dict[str, float]:
    """The numbers of a reading by names that stay, of all GPUs or of some; what is not known is left out.

    >>> from hotloop.monitor.reading import Gpu, Host
    >>> scalars(Reading(0.0, Host(cpu=12.5), (Gpu(0, "H200", utilisation=97.0, throttled=("heat",)),)))
    {'host/cpu': 12.5, 'gpu0/utilisation': 97.0, 'gpu0/throttled': 1.0}
    """
    numbers = {f"host/{name}": getattr(reading.host, name) for name in HOST_FIELDS}
    for gpu in reading.gpus:
        if is_among(gpu, gpus):
            numbers.update({f"gpu{gpu.index}/{name}": getattr(gpu, name) for name in GPU_FIELDS})
            numbers[f"gpu{gpu.index}/throttled"] = None if gpu.throttled is None else float(bool(gpu.throttled))
    return {name: value for name, value in numbers.items() if value is not None}


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


def _now(given: float | None) -> float:
    return time.time() if given is None else given


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
