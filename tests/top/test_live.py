"""The live view in a real pseudo-terminal: what is on the screen, what keys do, and what is left behind."""

import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..thorough import some

pyte = pytest.importorskip("pyte")

PATIENCE = 90.0  # seconds; only a program that hangs takes as long
ENTER, LEAVE, SHOW_CURSOR, WRAP = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h", b"\x1b[?7h"

# The terminal becomes that of the child, so that Ctrl-C and SIGWINCH reach it as they reach a program in a shell.
BEGIN = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
PROGRAM = BEGIN + "import sys; sys.argv[0] = 'hotloop'\nfrom hotloop.cli import main\nmain()\n"
VIEW = (
    BEGIN
    + """
import sys
from hotloop.apps.top.advice import Advice
from hotloop.apps.top.example import machine
from hotloop.apps.top.live import run

read = machine(int(sys.argv[1]), start=1_000_000_000.0)
advice = Advice("idle-memory", 0, "4.1 GiB is held by python3", "end it with `kill 7`")
taken = 0

def sample():
    global taken
    taken += 1
    if sys.argv[2:] == ["raise", str(taken)]:
        raise RuntimeError("the driver is gone")
    return read()

run(sample, lambda reading: (advice,), every=0.2)
print("left quietly")
"""
)


class Terminal:
    """A pseudo-terminal of a given size with a program in it, and the screen that a person would see."""

    def __init__(self, size: tuple[int, int], script: str, *arguments: str, **environ: str) -> None:
        self.person, self.program = os.openpty()
        self.raw = b""
        self.screen = pyte.Screen(*size)
        self.stream = pyte.ByteStream(self.screen)
        self._set_size(size)
        self.before = self.settings()
        kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdin=self.program,
            stdout=self.program,
            stderr=self.program,
            start_new_session=True,
            env={**kept, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environ},
        )

    def settings(self) -> list[object]:
        return termios.tcgetattr(self.program)

    def _set_size(self, size: tuple[int, int]) -> None:
        fcntl.ioctl(self.person, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        self._set_size((columns, lines))

    def type(self, keys: str) -> None:
        os.write(self.person, keys.encode())

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    def pump(self, seconds: float = 0.1) -> bool:
        """Draw what the program has written; whether there was anything."""
        if not select.select([self.person], [], [], seconds)[0]:
            return False
        new = os.read(self.person, 65536)
        self.raw += new
        self.stream.feed(new)
        return True

    def until(self, seen: Callable[[str], bool]) -> str:
        ends = time.monotonic() + PATIENCE
        while not seen(self.text):
            self.pump()
            assert time.monotonic() < ends, self.text
        return self.text

    def until_it_says(self, *words: str) -> str:
        return self.until(lambda text: all(word in text for word in words))

    def until_it_ends(self) -> int:
        ends = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            self.pump()
            assert time.monotonic() < ends, self.text
        while self.pump(0):
            pass
        print(self.raw.decode(errors="replace"))  # pytest shows it where a test fails
        return self.process.returncode

    def must_be_restored(self) -> None:
        assert self.settings() == self.before
        assert self.raw.count(ENTER) == self.raw.count(LEAVE) > 0
        for last in (LEAVE, SHOW_CURSOR, WRAP):
            assert self.raw.rindex(last) > self.raw.rindex(ENTER)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for end in (self.person, self.program):
            try:
                os.close(end)
            except OSError:  # closed by the test
                continue


@pytest.fixture
def opened() -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def terminal(*arguments: object, **environ: str) -> Terminal:
        terminals.append(Terminal(*arguments, **environ))  # type: ignore[arg-type]
        return terminals[-1]

    yield terminal
    for each in terminals:
        each.close()


@pytest.mark.parametrize("size", some([(80, 24), (200, 50)], [(80, 24)]))
def test_a_look_a_few_keys_and_quit(opened: Callable[..., Terminal], size: tuple[int, int]) -> None:
    terminal = opened(size, VIEW, "1")
    told = terminal.until_it_says("NVIDIA H200", "4 processes by memory", "python train.py", "4.1 GiB is held", "▄▄")
    rows = terminal.screen.display
    assert rows[0].startswith("hotloop top · workstation · driver 580.95.05")
    assert rows[-1].startswith("q quit")
    for word in ("utilisation", "64.0 of 141.0 GiB", "°C", "fan –", "of 700 W", "1,755 of 1,980 MHz", "power cap"):
        assert word in told
    for word in ("PCIe", "RAM", "disk read", "network in", "fix: end it with `kill 7`", "57.3 GiB", "user"):
        assert word in told

    terminal.type("p")
    terminal.until_it_says("4 processes by PID")
    terminal.type("fgue")
    terminal.until_it_says("user: gue")
    terminal.type("\r")
    terminal.until_it_says("1 process by PID, user gue")
    terminal.type("?")
    terminal.until_it_says("sort processes by memory", "Any key goes back")
    terminal.type("x")
    terminal.until_it_says("1 process by PID, user gue")
    terminal.type("\x1b")
    terminal.until_it_says("4 processes by PID")
    terminal.type("q")
    assert terminal.until_it_ends() == 0
    terminal.must_be_restored()
    assert b"left quietly" in terminal.raw
    assert terminal.raw.rindex(LEAVE) < terminal.raw.index(b"left quietly")


def test_it_follows_the_size_of_the_terminal(opened: Callable[..., Terminal]) -> None:
    terminal = opened((80, 24), VIEW, "8", COLUMNS="80", LINES="24")  # what a shell may have exported
    terminal.until_it_says("18 processes by memory", "q quit")
    for columns, lines in ((200, 60), (60, 15), (300, 80), (80, 24)):
        terminal.resize(columns, lines)

        def fits(text: str, columns: int = columns, lines: int = lines) -> bool:
            rows = text.split("\n")
            whole = rows[0].rstrip()[-3:-2] == ":" and len(rows[0].rstrip()) == columns
            drawn = rows[-1].startswith("q quit") and text.count("q quit") == 1 and "H200" in text
            return whole and len(rows) == lines and drawn  # and not in the middle of being drawn

        text = terminal.until(fits)
        assert text.count("hotloop top ·") == 1
    terminal.type("?")
    terminal.until_it_says("Any key goes back")
    terminal.resize(100, 30)
    assert "Any key goes back" in terminal.until(lambda text: len(text.split("\n")[0].rstrip()) == 100)
    terminal.type("x")
    terminal.until_it_says("18 processes")
    terminal.type("q")
    assert terminal.until_it_ends() == 0
    terminal.must_be_restored()


@pytest.mark.parametrize("how", ["\x03", signal.SIGINT])
def test_ctrl_c_quits(opened: Callable[..., Terminal], how: str | int) -> None:
    terminal = opened((80, 24), VIEW, "1")
    terminal.until_it_says("q quit")
    if isinstance(how, str):
        terminal.type(how)
    else:
        terminal.process.send_signal(how)
    assert terminal.until_it_ends() == 0
    terminal.must_be_restored()
    assert b"Traceback" not in terminal.raw


def test_sigterm_ends_it_with_a_restored_terminal(opened: Callable[..., Terminal]) -> None:
    terminal = opened((80, 24), VIEW, "1")
    terminal.until_it_says("q quit")
    terminal.process.terminate()
    assert terminal.until_it_ends() == 128 + signal.SIGTERM
    terminal.must_be_restored()
    assert b"Traceback" not in terminal.raw


@pytest.mark.parametrize("sample", ["1", "3"])
def test_an_error_leaves_a_restored_terminal_and_can_be_read(opened: Callable[..., Terminal], sample: str) -> None:
    terminal = opened((80, 24), VIEW, "1", "raise", sample)
    assert terminal.until_it_ends() == 1
    terminal.must_be_restored()
    assert terminal.raw.rindex(LEAVE) < terminal.raw.index(b"the driver is gone")


def test_a_terminal_that_is_closed_ends_it(opened: Callable[..., Terminal]) -> None:
    terminal = opened((80, 24), VIEW, "1")
    terminal.until_it_says("q quit")
    os.close(terminal.program)
    os.close(terminal.person)
    terminal.process.wait(PATIENCE)  # raises where it goes on for nobody


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash for its job control")
def test_ctrl_z_gives_the_terminal_back_and_fg_goes_on(opened: Callable[..., Terminal], tmp_path: Path) -> None:
    script = tmp_path / "view.py"
    script.write_text(VIEW.removeprefix(BEGIN))
    shell = BEGIN + "import os; os.execvp('bash', ['bash', '--norc', '--noprofile', '-i'])"
    terminal = opened((80, 24), shell, PS1="ready> ")
    terminal.until_it_says("ready> ")
    terminal.type(f"{sys.executable} {script} 1\n")
    terminal.until_it_says("q quit", "NVIDIA H200")
    terminal.type("\x1a")
    terminal.until(lambda _: b"Stopped" in terminal.raw.rpartition(LEAVE)[2])
    assert terminal.raw.count(ENTER) == terminal.raw.count(LEAVE) == 1
    terminal.type("fg\n")
    terminal.until(lambda _: terminal.raw.count(ENTER) == 2)
    terminal.until_it_says("q quit", "NVIDIA H200")
    terminal.type("q")
    terminal.until(lambda _: b"left quietly" in terminal.raw)
    terminal.type("exit\n")
    terminal.until_it_ends()
    assert terminal.raw.count(LEAVE) == 2


def test_the_program_itself_on_this_machine(opened: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = opened((80, 24), PROGRAM, "top", "--interval", "0.2")
    terminal.until_it_says("hotloop top", "RAM", "q quit")
    terminal.type("q")
    assert terminal.until_it_ends() == 0
    terminal.must_be_restored()


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_and_dumb_terminals_get_plain_text(opened: Callable[..., Terminal], environ: dict[str, str]) -> None:
    terminal = opened((80, 24), PROGRAM, "top", "--example", "1", "--interval", "0.1", "--count", "2", **environ)
    assert terminal.until_it_ends() == 0
    assert b"\x1b" not in terminal.raw
    assert terminal.raw.count(b"hotloop top") == 2
    assert terminal.settings() == terminal.before


def test_once_in_a_terminal_has_colours_and_stays(opened: Callable[..., Terminal]) -> None:
    terminal = opened((80, 24), PROGRAM, "top", "--example", "1", "--once")
    assert terminal.until_it_ends() == 0
    assert b"\x1b[" in terminal.raw
    assert ENTER not in terminal.raw
    assert "NVIDIA H200" in terminal.text


def test_a_terminal_without_utf_8_is_shown_what_it_has(opened: Callable[..., Terminal]) -> None:
    terminal = opened((80, 24), VIEW, "1", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    told = terminal.until_it_says("NVIDIA H200", "q quit", "####")
    assert told.isascii()
    terminal.type("q")
    assert terminal.until_it_ends() == 0
