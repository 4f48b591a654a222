"""The summary in the terminal."""

from dataclasses import replace

from rich.console import Console

from hotloop.records import Report
from hotloop.report.training_page import summary

from .reports import made_report


def shown(report: Report, width: int = 80) -> str:
    console = Console(width=width, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(summary(report, "a run"))
    return capture.get()


def test_the_numbers_are_there_and_what_is_unknown_says_so() -> None:
    text = shown(made_report())
    for expected in ("a run", "83.3%", "4,000", "Test CPU", "3 epochs", "fp32", "unknown"):
        assert expected in text
    assert "unknown" in shown(replace(made_report(), epochs=(), curve=(), steps=0))
    assert "Stopped by the time limit" in shown(replace(made_report(), interrupted=True, stopped="the time limit"))
    for width in (40, 80, 120):
        assert max(len(line) for line in shown(made_report(), width).splitlines()) <= width


def test_text_from_outside_cannot_steer_the_terminal_nor_be_read_as_markup() -> None:
    text = shown(replace(made_report(), device_name="[red]GPU\x1b[2J"))
    assert "\x1b[2J" not in text
    assert "[red]GPU" in text
