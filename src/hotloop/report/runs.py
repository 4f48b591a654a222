"""Runs that were kept: what each folder's report.json says of it, a list of them, and two side by side."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hotloop.errors import BadArgument
from hotloop.printing.text import count, duration, printable, shorten, size
from hotloop.records import Record, Report
from hotloop.report import words
from hotloop.report.words import DASH, times

PAGE, DATA = "report.html", "report.json"
NAME = 26  # characters of a folder's name that a column has room for
LARGEST = 256 << 20  # bytes of a report.json that are read
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

    def with_data(self, data: dict[str, Any]) -> dict[str, Any]:
        """The whole of a report.json: this, and all that was measured."""
        return {**self.to_json(), **{name: value for name, value in data.items() if name not in self.to_json()}}


def run_of(report: Report, title: str) -> Run:
    """The entry of a training."""
    return Run("train", title, report.started, report.device_name or report.device, figures_of(report))


def figures_of(report: Report, prefix: str = "") -> dict[str, float]:
    """What two trainings can be compared by."""
    figures: dict[str, float | None] = {
        "items per second": report.items_per_second,
        "seconds": report.seconds,
        "training loss": report.epochs[-1].loss if report.epochs else None,
        "peak memory in bytes": report.peak_memory,
        "energy for 1,000 items in joules": None if report.load is None else report.load.joules_per(report.watched),
    }
    scored = words.last_scored(report)
    figures |= {f"validation {name}": value for name, value in (scored.metrics if scored else {}).items()}
    return {prefix + name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


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
        file = place / DATA
        if not file.is_file():
            continue
        try:
            found.append(read_run(place))
        except BadArgument as error:
            failed.append(str(error))
    return sorted(found, key=lambda kept: kept.run.started, reverse=True), failed


def read_run(folder: Path) -> KeptRun:
    """The run that a folder holds."""
    file = folder / DATA if folder.is_dir() else folder
    shown = printable(str(file))
    try:
        if file.stat().st_size > LARGEST:
            raise BadArgument(f"{shown} is larger than any report", fix="choose another folder")
        data = json.loads(file.read_text(encoding="utf-8"))
        run = _run_in(data)
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
        for words_ in (f"{words.when(run.started)}, {run.device}", figures):
            if words_:
                lines.append(Padding(Text(printable(words_), style="dim"), (0, 0, 0, 2)))
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
        ("when", words.when(a.run.started), words.when(b.run.started)),
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
    return words.metric(name, value) if abs(value) < 100 else count(value)
