"""The summary of a `Report` for the terminal."""

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hotloop.records import Report
from hotloop.report.words import Fact, headlines, setting
from hotloop.text import printable


def summary(report: Report, title: str = "the run") -> Panel:
    """The headline numbers of a run, in a frame."""
    lines: list[Table | Text] = [_grid(_facts(report))]
    if report.interrupted:
        lines.insert(0, Text("Stopped by Ctrl-C: these are the numbers up to there.\n", style="yellow"))
    return Panel(
        Group(*lines),
        title=Text(printable(title)),
        title_align="left",
        border_style="dim",
        expand=False,
        padding=(0, 1),
    )


def _facts(report: Report) -> list[Fact]:
    shown = ("precision", "model", "peak memory on the device")
    return [*headlines(report), *(fact for fact in setting(report) if fact.label in shown)]


def _grid(facts: list[Fact]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(justify="left", overflow="fold")
    grid.add_column(style="dim", overflow="fold")
    for number, fact in enumerate(facts):
        style = "bold green" if number == 0 else "bold"
        grid.add_row(fact.label, Text(printable(fact.value), style=style), Text(printable(fact.detail)))
    return grid
