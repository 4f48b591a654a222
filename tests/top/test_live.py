"""The live view in a pseudo-terminal: what is on the screen, and what is left behind."""

import fcntl
import os
import re
import signal
import struct
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..cli.conftest import Terminal
from ..warm import Running, Warm

ENTER, LEAVE, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"
VIEW = """
import itertools, sys
from hotloop.apps.top import live
from hotloop.apps.top.advice import Advice
from hotloop.apps.top.example import machine

read = machine(1, start=1_000_000_000.0)
advice = Advice("idle-memory", 0, "4.1 GiB is held by python3", "end it with `kill 7`")

def taken():
    for number in itertools.count():
        yield read(), (advice,)
        live.time.sleep(0.05)
        if number > 2 and sys.argv[1:]:
            raise RuntimeError("the driver is gone")

live._me = lambda: "user"
live.show(taken(), once=False)
"""


class Window(Terminal):
    """A terminal that has a size."""

    def __init__(self, warm: Warm, folder: Path) -> None:
        super().__init__(warm, folder)
        self.resize(80, 24)
        self.before = self.settings()

    def settings(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def start(self, *command: str, **environ: str) -> Running:
        kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
        environment = {**kept, "TERM": "xterm-256color", **environ}
        name = os.ttyname(self._theirs)
        return self._warm.start(*command, cwd=self._folder, environment=environment, terminal=name)

    def view(self, *arguments: str) -> Running:
        (self._folder / "view.py").write_text(VIEW)
        return self.start("view.py", *arguments)

    def width(self) -> int:
        """Of what was drawn last and whole."""
        drawn = self.text.split("\x1b[H")[-2:-1] or [""]
        return max(len(line.rstrip()) for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn[0]).splitlines() or [""])

    def must_be_restored(self) -> None:
        assert self.settings() == self.before
        assert self.text.count(ENTER) == self.text.count(LEAVE) > 0
        for last in (LEAVE, SHOW_CURSOR):
            assert self.text.rindex(last) > self.text.rindex(ENTER)


@pytest.fixture
def window(warm: Warm, tmp_path: Path) -> Iterator[Window]:
    opened = Window(warm, tmp_path)
    yield opened
    opened.close()


def test_it_follows_the_size_of_the_terminal_and_ctrl_c_ends_it(window: Window) -> None:
    running = window.start("-m", "hotloop", "top", "--demo", "--interval", "0.1")
    for words in ("hotloop top · DEMO", "NVIDIA H200", "RAM", "6 processes", "python train.py"):
        window.read_until(words)
    for columns, lines in ((200, 60), (60, 15), (80, 24)):
        window.resize(columns, lines)
        while window.width() not in (columns, columns - 1):
            window.read()
    window.type("\x03")
    assert window.end(running) == 130
    window.must_be_restored()
    assert "Traceback" not in window.text


def test_sigterm_ends_it_with_a_restored_terminal(window: Window) -> None:
    running = window.view()
    for words in ("NVIDIA H200", "4.1 GiB is held", "fix: end it with `kill 7`", "▸"):
        window.read_until(words)
    os.kill(running.pid, signal.SIGTERM)
    assert window.end(running) == 128 + signal.SIGTERM
    window.must_be_restored()
    assert "Traceback" not in window.text


def test_an_error_leaves_a_restored_terminal_and_can_be_read(window: Window) -> None:
    assert window.end(window.view("raise")) == 1
    window.must_be_restored()
    assert window.text.rindex(LEAVE) < window.text.index("the driver is gone")


def test_a_terminal_that_is_closed_ends_it(window: Window) -> None:
    running = window.view()
    window.read_until("NVIDIA H200")
    window.close()
    assert running.wait() != 0  # it does not go on for nobody
    window._ours, window._theirs = os.openpty()


def test_once_stays_on_the_screen_in_what_the_terminal_has(window: Window) -> None:
    poor = {"PYTHONIOENCODING": "ascii", "TERM": "dumb"}
    assert window.end(window.start("-m", "hotloop", "top", "--demo", "--once", **poor)) == 0
    assert "NVIDIA H200" in window.text
    assert window.text.isascii()
    assert "\x1b[" not in window.text, "a dumb terminal has no colours"
    assert window.settings() == window.before
