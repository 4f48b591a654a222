"""What a person sees while a run is under way."""

import io
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hotloop.records import Epoch
from hotloop.run.display import display_of, telling
from hotloop.run.stop import Stop, ending_words

DONE = Epoch(number=1, loss=0.51234, items=1000, seconds=2.0, losses={}, metrics={"accuracy": 0.975})


def shown(*, terminal: bool, show: bool | None = None, width: int = 120) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width)
    with display_of(2, 10, show, console) as display:
        for _ in range(10):
            display.stretch(1, 1, 0.75, 1234.0)
        time.sleep(0.15)
        display.stretch(1, 1, 0.5, 1234.0)
        display.epoch(DONE)
    return file.getvalue()


def test_a_bar_in_a_terminal() -> None:
    text = shown(terminal=True)
    for part in ("epoch 1/2", "/20", "loss 0.5", "1,234 items/s"):
        assert part in text
    assert re.search(r"0:00:0\d · (-:--:--|\d:\d\d:\d\d) left", re.sub(r"\x1b\[[\d;]*m", "", text))
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", shown(terminal=True, width=80)))
    bars = [line for line in lines if "items/s" in line and "left" in line]
    assert {len(bar) for bar in bars} == {78}, "room for the words of Ctrl-C"


def test_a_line_per_epoch_elsewhere() -> None:
    assert shown(terminal=False) == "epoch 1/2  loss 0.5123  validation accuracy 0.975  500 items/s  2.00 s\n"
    assert shown(terminal=False, show=False) == shown(terminal=True, show=False) == ""


def test_a_line_that_is_too_long_for_the_terminal_breaks_between_two_figures() -> None:
    file = io.StringIO()
    with display_of(4, 10, None, Console(file=file, force_terminal=True, color_system=None, width=80)) as display:
        display.epoch(replace(DONE, loss=2.031, metrics={"accuracy": 0.1279, "loss": 2.075}, items=255, seconds=1.25))
        display.say("not tuned: " + "the step changes what trials could not restore, " * 3)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*\w", "\n", file.getvalue()).splitlines()]
    assert "epoch 1/4  loss 2.031  validation accuracy 0.1279, loss 2.075  204 items/s" in lines
    assert "  1.25 s" in lines
    (told,) = (i for i, line in enumerate(lines) if line.startswith("not tuned:"))
    assert all(len(line) <= 80 for line in lines[told:])
    assert lines[told].endswith(("the", "step", "changes", "what", "trials", "could", "not", "restore,"))


def test_a_bar_begins_where_an_earlier_part_of_the_run_has_ended() -> None:
    file = io.StringIO()
    with display_of(2, 10, None, Console(file=file, force_terminal=True, width=120), done=12) as display:
        display._bar.refresh()
        time.sleep(0.15)
        display.stretch(1, 2, 0.5, 1234.0)
        (task,) = display._bar.tasks
        assert task.completed == 13
        assert task.speed is None, "twelve batches in no time are not a speed"
    assert set(re.findall(r"(\d+)/20", file.getvalue())) == {"12", "13"}


class Time:
    """A clock that goes on when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("hotloop.run.display.time", SimpleNamespace(monotonic=lambda: self.now))


def logged(monkeypatch: pytest.MonkeyPatch, epochs: int, length: int | None, every: float) -> list[str]:
    """Lines of a log: batches that take `every` seconds each."""
    clock, file = Time(monkeypatch), io.StringIO()
    with display_of(epochs, length, None, Console(file=file, width=80)) as display:
        for number in range(1, epochs + 1):
            for _ in range(length or 10):
                clock.now += every
                display.stretch(1, number, 0.5, 32 / every)
            display.epoch(replace(DONE, number=number))
    return file.getvalue().splitlines()


def test_a_long_epoch_gives_a_log_a_line_every_thirty_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = logged(monkeypatch, 2, 100, 1.0)
    assert [line.partition("  ")[0] for line in lines] == 4 * ["epoch 1/2"] + 4 * ["epoch 2/2"]
    assert lines[0] == "epoch 1/2  batch 30/100  loss 0.5  32 items/s  0:02:50 left"
    assert lines[3].endswith("2.00 s  0:01:40 left")
    assert lines[4].startswith("epoch 2/2  batch 30/100 ")
    assert not lines[-1].endswith("left")


def test_short_epochs_give_a_log_their_own_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(logged(monkeypatch, 5, 10, 0.5)) == 5
    assert "0:00:15 left" in logged(monkeypatch, 5, 10, 0.5)[1]


def test_the_time_left_is_not_told_where_the_length_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = logged(monkeypatch, 2, None, 20.0)
    assert lines[0] == "epoch 1/2  batch 2  loss 0.5  1.6 items/s"
    assert not any("left" in line for line in lines)


class Notebook:
    """What a notebook was told to show: each output by its name, as it was drawn last."""

    def __init__(self) -> None:
        self.outputs: dict[str, dict[str, str]] = {}
        self.drawings: list[str] = []

    def display(self, content: dict[str, str], *, raw: bool, display_id: str) -> None:
        assert raw
        assert display_id not in self.outputs, "a second output below the first"
        self._draw(content, display_id)

    def update_display(self, content: dict[str, str], *, raw: bool, display_id: str) -> None:
        assert raw
        assert display_id in self.outputs
        self._draw(content, display_id)

    def _draw(self, content: dict[str, str], name: str) -> None:
        self.outputs[name] = content
        self.drawings.append(content["text/html"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    shown = Notebook()
    module: Any = ModuleType("IPython.display")
    module.display, module.update_display = shown.display, shown.update_display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    return shown


def test_a_notebook_has_one_output_that_is_drawn_again(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time(monkeypatch)
    with display_of(30, 10, None) as display:
        display.say("a plan < was found")
        for number in range(1, 31):
            for _ in range(10):
                clock.now += 0.6
                display.stretch(1, number, 0.75, 1234.0)
            display.epoch(replace(DONE, number=number))
            if number == 2:
                assert "epoch 2/30 · batch 20/300 · loss 0.75 · 1,234 items/s" in notebook.drawings[-1]
                assert "0:00:12 elapsed · 0:02:48 left" in notebook.drawings[-1]
                assert "width:6.67%" in notebook.drawings[-1]
    (last,) = notebook.outputs.values()
    html = last["text/html"]
    assert "a plan &lt; was found" in html
    assert "validation accuracy" in html
    assert "97.5%" in html
    assert html.count("<tr>") == 21, "a header and the last twenty epochs"
    assert "10 epochs before these" in html
    assert "elapsed" not in html, "the bar goes when the run has ended"
    assert "epoch 30  loss 0.5123" in last["text/plain"]
    assert max(map(len, notebook.drawings)) < 20_000


def test_a_notebook_is_drawn_twice_a_second_at_most(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time(monkeypatch)
    with display_of(100, 100, None) as display:
        for number in range(1, 101):
            for _ in range(100):
                clock.now += 0.001
                display.stretch(1, number, 0.5, 1000.0)
            display.epoch(replace(DONE, number=number))
    assert len(notebook.drawings) <= 2 * 10 + 3


def test_a_notebook_says_where_an_error_has_ended_the_run(notebook: Notebook) -> None:
    def fail() -> None:
        with display_of(2, 10, None) as display:
            display.stretch(7, 1, 0.5, 100.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    (last,) = notebook.outputs.values()
    assert "ended by ZeroDivisionError after batch 7/20" in last["text/html"]


def test_a_notebook_can_be_silent(notebook: Notebook) -> None:
    with display_of(2, 10, False) as display:
        display.say("words")
        display.stretch(10, 1, 0.5, 100.0)
        display.epoch(DONE)
    with telling("predicting", False) as tell:
        tell("batch 3")
    assert notebook.outputs == {}


def test_a_notebook_that_cannot_draw_again_gets_lines(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del sys.modules["IPython.display"].update_display
    clock = Time(monkeypatch)
    with display_of(1, 100, None) as display:
        for _ in range(100):
            clock.now += 0.5
            display.stretch(1, 1, 0.75, 1234.0)
        display.epoch(Epoch(1, 0.5, 800, 50.0, {}, {}))
    with telling("predicting", None) as tell:
        tell("batch 3")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, "one on the way, and one of the epoch"
    assert all(line.startswith("epoch 1/1") for line in lines)
    assert notebook.outputs == {}


def test_what_a_notebook_is_told_of_other_work_goes_when_it_is_done(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # to import it is an error
    with telling("predicting", None) as tell:
        time.sleep(0.55)
        tell("batch 3")
        assert "predicting: batch 3" in notebook.drawings[-1]
    (last,) = notebook.outputs.values()
    assert "predicting" not in last["text/html"]


def test_an_early_end_says_what_was_saved_and_how_to_go_on() -> None:
    place = "step 1,340, epoch 3 of 10"
    saved = ending_words("SIGTERM", place, (Path("runs/a"), 1340))
    assert "SIGTERM, at step 1,340" in saved
    assert "saved in runs/a: resume=True (`--resume`) continues from there" in saved
    assert "saved in runs/a at step 900:" in ending_words("the time limit", place, (Path("runs/a"), 900))
    assert "no checkpoint could be written to runs/a" in ending_words("Ctrl-C", place, (Path("runs/a"), None))
    for step in (None, 900):
        words = ending_words("Ctrl-C", place, (Path("runs/a"), step), is_writing=True)
        assert words.endswith(
            "a checkpoint is still being written to runs/a, from which resume=True (`--resume`) continues"
        )
    assert "nothing is on disk" in ending_words("Ctrl-C", place, None)
    assert ending_words("no better loss in 3 epochs", place, None).endswith(place)


def test_the_death_of_a_child_interrupts_nothing_after_that() -> None:
    def complain(signum: int, frame: object) -> None:
        raise RuntimeError("a worker was killed")

    before = signal.signal(signal.SIGCHLD, complain)
    try:
        stop = Stop()
        with stop.listening(terminate=True):
            with pytest.raises(RuntimeError):
                signal.raise_signal(signal.SIGCHLD)
            os.kill(os.getpid(), signal.SIGTERM)
            signal.raise_signal(signal.SIGCHLD)
        assert signal.getsignal(signal.SIGCHLD) is complain
    finally:
        signal.signal(signal.SIGCHLD, before)
