"""Summaries for the terminal."""

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hotloop.printing.text import printable
from hotloop.records import Report
from hotloop.report.words import Fact, headlines, setting, stopper


def summary(report: Report, title: str = "the run") -> Panel:
    """The headline numbers of a run, in a frame."""
    shown = ("precision", "model", "peak memory on the device")
    facts = [*headlines(report), *(fact for fact in setting(report) if fact.label in shown)]
    return panel(facts, title, stopped=stopper(report) if report.interrupted else None)


def panel(facts: Sequence[Fact], title: str, *, stopped: str | None = None) -> Panel:
    """Facts in a frame, the first one in green; `stopped` is what ended the run before its time."""
    lines: list[Table | Text] = [_grid(facts)]
    if stopped is not None:
        lines.insert(0, Text(f"Stopped by {stopped}: these are the numbers up to there.\n", style="yellow"))
    return Panel(
        Group(*lines),
        title=Text(printable(title)),
        title_align="left",
        border_style="dim",
        expand=False,
        padding=(0, 1),
    )


def lined(header: Sequence[str], *, words: Collection[int], wraps: Collection[int], caption: str = "") -> Table:
    """A table between two lines: columns of `words` stand to the left, and those in `wraps` may take several lines."""
    table = Table(box=box.HORIZONTALS, padding=(0, 1, 0, 0), pad_edge=False, border_style="dim", header_style="dim")
    table.caption, table.caption_justify = caption, "left"
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i in words else "right", no_wrap=i not in wraps, overflow="fold")
    return table


def _grid(facts: Sequence[Fact]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(justify="left", overflow="fold")
    if has_details := any(fact.detail for fact in facts):
        grid.add_column(style="dim", overflow="fold")
    for number, fact in enumerate(facts):
        style = "bold green" if number == 0 else "bold"
        details = [Text(printable(fact.detail))] if has_details else []
        grid.add_row(fact.label, Text(printable(fact.value), style=style), *details)
    return grid
