"""What the tests of the command line share."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pyte
import pytest

from hotloop.cli import main

from ..warm import HOTLOOP, Running, Warm


class Done(NamedTuple):
    """How a command ended, and what it printed."""

    code: object
    out: str
    err: str

    def assert_told(self, words: str, code: int = 2) -> None:
        """It was a mistake, and is told in one clear message."""
        assert self.code == code
        assert words in self.err
        assert "fix:" in self.err
        assert "Traceback" not in self.err


Run = Callable[..., Done]


@pytest.fixture
def run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """The command line in this process, which has torch loaded already, and in a folder of its own.

    `VERB` of a test's module stands before the arguments.
    """
    verb = getattr(request.module, "VERB", ())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("HOTLOOP_DEBUG", raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def call(*args: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["hotloop", *verb, *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code or 0, *capfd.readouterr())

    yield call
    for name in ("mine", "beside"):  # the files of a test
        sys.modules.pop(name, None)


class Terminal:
    """A pseudo-terminal, in which a person types."""

    def __init__(self, warm: Warm, folder: Path) -> None:
        self._warm, self._folder = warm, folder
        self._ours, self._theirs = os.openpty()
        os.set_blocking(self._ours, False)
        self.text, self.columns = "", 80

    def begin(self, *args: str) -> Running:
        self.text = ""
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(self.columns), "LINES": "40"}
        name = os.ttyname(self._theirs)
        return self._warm.start(*HOTLOOP, *args, cwd=self._folder, environment=env, terminal=name, forks=True)

    def read_until(self, pattern: str, times: int = 1, timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while len(re.findall(pattern, self.plain)) < times:
            assert time.monotonic() < end, f"{pattern!r} did not come:\n{self.text}"
            self.read()

    def read(self) -> None:
        """All that is there."""
        try:
            while True:
                self.text += os.read(self._ours, 100_000).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.01)

    def end(self, running: Running) -> int:
        """Its exit code, once it has asked for nothing more."""
        while psutil.Process(running.pid).status() != psutil.STATUS_ZOMBIE:  # it writes into a buffer of some kilobytes
            self.read()
        self.read()
        return running.wait()

    def run(self, *args: str) -> int:
        """A command that asks nothing, to its end."""
        return self.end(self.begin(*args))

    def type(self, words: str) -> None:
        os.write(self._ours, words.encode())

    def close(self) -> None:
        os.close(self._ours)
        os.close(self._theirs)

    @property
    def plain(self) -> str:
        """All that was shown, without what moves the cursor or colours it."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)

    def screen(self) -> list[str]:
        """What is to be seen, as a terminal shows it."""
        shown = pyte.Screen(self.columns, 400)
        pyte.Stream(shown).feed(self.text)
        return [line.rstrip() for line in shown.display]


@pytest.fixture
def terminal(warm: Warm, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(warm, tmp_path)
    yield opened
    opened.close()
