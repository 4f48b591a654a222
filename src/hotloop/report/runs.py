"""Runs that are kept: the folder of one, what its report.json says of it, a list of them, and two side by side."""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hotloop.errors import BadArgument, OutputError
from hotloop.printing.text import count, duration, metric, printable, shorten, size
from hotloop.records import Record
from hotloop.records.files import cannot_write, write_json, write_whole
from hotloop.report.words import DASH, times, when

RUNS = Path("runs")
PAGE, DATA = "report.html", "report.json"
NAME = 26  # characters of a folder's name that a column has room for
# What a figure is called says what it is in, and which way is better.
UNITS: dict[str, Callable[[float], str]] = {
    "seconds": duration,
    "bytes": size,
    "joules": lambda value: f"{count(value)} J",
    "per second": count,
}
LESS_IS_BETTER = ("seconds", "bytes", "joules", "loss", "error", "perplexity", "findings")


@dataclass(frozen=True)
class Run(Record):
    """What a run was, and its figures by name: those of two runs with the same name can be compared."""

    kind: str  # train, demo, bench, tune, doctor, profile or simulate
    title: str
    started: str  # ISO 8601, UTC
    device: str
    figures: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: str, title: str, started: str, device: str, figures: Mapping[str, float | None]) -> "Run":
        """With those of the figures that are known."""
        return cls(kind, title, started, device, {name: v for name, v in figures.items() if v is not None})

    def with_data(self, data: dict[str, Any]) -> dict[str, Any]:
        """The whole of a report.json: this, and all that was measured."""
        return {**self.to_json(), **data, **self.to_json()}


class RunFolder:
    """A folder that is being filled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: list[Path] = []

    def write(self, name: str, content: str | bytes) -> None:
        """Write one file."""
        # A name of a file may hold bytes that are no text.
        data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
        self.written.append(self.path / name)
        write_whole(self.path / name, data, sync=False)

    def write_json(self, name: str, data: dict[str, Any]) -> None:
        self.written.append(self.path / name)
        write_json(self.path / name, data, sync=False)


@contextmanager
def new_run(out: Path | None = None) -> Iterator[RunFolder]:
    """A new folder for a run: `out`, or `runs/` and the time. After an error, nothing of it is left.

    It is made before the block begins, so that a long run does not end in a folder that cannot be written.

    >>> with tempfile.TemporaryDirectory() as parent, new_run(Path(parent, "first")) as run:
    ...     run.write("hello.txt", "hello")
    """
    path = _unused(RUNS / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")) if out is None else out
    try:
        is_folder = path.is_dir()
        if os.path.lexists(path) and (not is_folder or any(path.iterdir())):
            raise OutputError(
                f"{printable(str(path))} {'is not empty' if is_folder else 'is there, and is no folder'}",
                fix="choose a new name; nothing that is there is overwritten",
            )
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=out is not None)
        tempfile.TemporaryFile(dir=path).close()
    except OutputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        raise cannot_write(path, error) from error
    run = RunFolder(path)
    try:
        yield run
    except BaseException:
        with suppress(OSError):  # something else may have used a folder since
            for file in run.written:
                file.unlink(missing_ok=True)
            for folder in missing:
                folder.rmdir()
        raise


def _unused(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, … that is not there: two runs may start in the same second."""
    number, candidate = 1, path
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


@dataclass(frozen=True)
class KeptRun:
    """A run and the folder that holds it."""

    folder: Path
    run: Run

    @property
    def name(self) -> str:
        return printable(self.folder.name)


def kept_in(folder: Path) -> tuple[list[KeptRun], list[str]]:
    """The runs in a folder and in the folders right below it, the latest first; and what could not be read."""
    if not folder.is_dir():
        raise BadArgument(f"there is no folder {printable(str(folder))}", fix="give one that holds runs, such as runs/")
    found, failed = [], []
    for place in (folder, *sorted(child for child in folder.iterdir() if child.is_dir())):
        try:
            if (place / DATA).is_file():
                found.append(read_run(place))
        except BadArgument as error:
            failed.append(str(error))
    return sorted(found, key=lambda kept: kept.run.started, reverse=True), failed


def read_run(folder: Path) -> KeptRun:
    """The run that a folder holds."""
    file = folder / DATA if folder.is_dir() else folder
    shown = printable(str(file))
    try:
        run = _run_in(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise BadArgument(
            f"{shown} cannot be read: {error.strerror or error}", fix="give the folder of a run, which holds it"
        ) from error
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise BadArgument(f"{shown} is not the report of a run", fix="choose a folder that hotloop wrote") from error
    return KeptRun(file.parent, run)


def _run_in(data: dict[str, Any]) -> Run:
    words_of = {name: data[name] for name in ("kind", "title", "started", "device")}
    if not all(isinstance(value, str) for value in words_of.values()):
        raise ValueError("not words")
    figures = {str(name): float(value) for name, value in data["figures"].items() if isinstance(value, int | float)}
    return Run(**words_of, figures={name: value for name, value in figures.items() if math.isfinite(value)})


def runs_list(runs: Sequence[KeptRun]) -> Group:
    """The runs one below the other; the names of folders stay whole, to be copied."""
    lines: list[RenderableType] = []
    for kept in runs:
        run = kept.run
        figures = shorten([f"{_unitless(name)} {said(name, value)}" for name, value in run.figures.items()], 3)
        lines.append(_whole((kept.name, "bold"), f"  {printable(f'{run.kind}: {run.title}')}"))
        told = filter(None, (f"{when(run.started)}, {run.device}", figures))
        lines += [Padding(Text(printable(line), style="dim"), (0, 0, 0, 2)) for line in told]
    return Group(*lines)


def _whole(*parts: str | tuple[str, str]) -> Text:
    """Words on one line, however long."""
    return Text.assemble(*parts, no_wrap=True, overflow="ignore")


def compared(a: Run, b: Run) -> Iterator[tuple[str, str, str, str, bool | None]]:
    """Each figure of either: its name, both values, how they stand, and whether the second one is better."""
    for name in dict.fromkeys([*a.figures, *b.figures]):
        first, second = a.figures.get(name), b.figures.get(name)
        ratio = second / first if first and second is not None and second / first > 0 else None
        better = None
        if first is not None and second is not None and first != second:
            better = (second < first) == name.endswith(LESS_IS_BETTER)
        yield name, said(name, first), said(name, second), DASH if ratio is None else times(ratio), better


def comparison(a: KeptRun, b: KeptRun) -> Group:
    """Two runs side by side, under their names where these are short, else below these."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("")
    heads, above = [a.name, b.name], []
    if max(map(len, heads)) > NAME:
        above = [_whole(f"{head:<8}", (name, "bold")) for head, name in zip(("first", "second"), heads, strict=True)]
        heads = ["first", "second"]
    for head in heads:
        table.add_column(Text(head), justify="right", min_width=len(head))
    table.add_column("", justify="right", no_wrap=True)
    for label, first, second in (
        ("what", f"{a.run.kind}: {a.run.title}", f"{b.run.kind}: {b.run.title}"),
        ("when", when(a.run.started), when(b.run.started)),
        ("device", a.run.device, b.run.device),
    ):
        table.add_row(Text(label, style="dim"), Text(printable(first)), Text(printable(second)), "")
    for name, first, second, ratio, better in compared(a.run, b.run):
        style = "" if better is None else "green" if better else "yellow"
        table.add_row(Text(printable(name)), Text(first), Text(second), Text(ratio, style=style))
    return Group(*above, table)


def _unitless(name: str) -> str:
    """A figure's name without the unit, which stands with its value.

    >>> _unitless("mean step in seconds"), _unitless("seconds")
    ('mean step', 'seconds')
    """
    before = next((name.removesuffix(f" in {unit}") for unit in UNITS if name.endswith(f" in {unit}")), name)
    return before.removesuffix(",")


def said(name: str, value: float | None) -> str:
    """A figure in the unit that its name ends with.

    >>> said("seconds", 75.0), said("peak memory in bytes", 2048), said("validation accuracy", 0.5), said("rows", 1234)
    ('1 min 15 s', '2.0 KiB', '50.0%', '1,234')
    """
    if value is None:
        return DASH
    unit = next((unit for unit in UNITS if name.endswith(unit)), None)
    if unit is not None:
        return UNITS[unit](value)
    return metric(name, value) if abs(value) < 100 else count(value)
