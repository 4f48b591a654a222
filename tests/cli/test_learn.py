"""`hotloop learn` as a person uses it: in a terminal, in a pipe, and from a program."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyte
import pytest
from typer.testing import CliRunner

from hotloop.apps.learn.checking import Result
from hotloop.apps.learn.exercise import exercise
from hotloop.apps.learn.judging import CheckVerdict
from hotloop.cli import app

from ..warm import HOTLOOP, Running, Warm

Invoke = Callable[..., Any]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTLOOP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data" / "learn.json"


@pytest.fixture
def learn() -> Invoke:
    """The command in this process, with its answers from a pipe."""

    def invoke(*args: str, answers: str = "") -> Any:
        return CliRunner().invoke(app, ["learn", *args], input=answers)

    return invoke


def test_the_list_has_every_lesson_and_what_was_done(learn: Invoke) -> None:
    first = learn().stdout
    assert len(re.findall(r"^ *\d+  .* min +not opened +not checked", first, re.MULTILINE)) == 16
    assert "Next: `hotloop learn 1`" in first
    assert max(map(len, first.splitlines())) <= 80


def test_the_list_as_json(learn: Invoke) -> None:
    data = json.loads(learn("--json").stdout)
    assert [row["number"] for row in data["lessons"]] == list(range(1, 17))
    assert data["quiz"] == {"right": 0, "answered": 0, "questions": data["quiz"]["questions"]}


def test_a_lesson_in_a_pipe_runs_through_without_a_question(learn: Invoke) -> None:
    done = learn("12")
    assert done.exit_code == 0
    assert "Enter runs it" not in done.stdout
    assert "held by others than 4242: 1166 MiB" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = json.loads(learn("--json").stdout)["lessons"]
    assert {row["number"]: row["lesson"] for row in rows}[12] == "done"


@pytest.mark.parametrize("args", [("99",), ("start", "99"), ("check", "99"), ("quiz", "99")])
def test_a_number_that_does_not_exist_is_told(learn: Invoke, args: tuple[str, ...]) -> None:
    done = learn(*args)
    assert "99" in str(done.exception)
    assert "fix:" in str(done.exception)


def test_start_gives_the_file_and_never_overwrites(learn: Invoke, tmp_path: Path) -> None:
    done = learn("start", "3")
    assert done.exit_code == 0
    file = tmp_path / "03_golden_rule.py"
    assert file.read_text() == exercise(3).file.read_text()
    assert "hotloop learn check 3" in done.stdout
    assert "breaks the golden rule" in done.stdout
    file.write_text("mine")
    assert "is left as it is" in str(learn("start", "3").exception)
    assert file.read_text() == "mine"
    assert "no folder" in str(learn("start", "3", "nowhere").exception)


def test_a_file_that_is_not_there_is_told_with_what_to_do(learn: Invoke) -> None:
    told = str(learn("check", "3").exception)
    assert "there is no file 03_golden_rule.py" in told
    assert "hotloop learn start 3" in told


@pytest.mark.parametrize("right", [True, False])
def test_a_check_says_right_or_not_with_a_hint_and_keeps_it(
    learn: Invoke, monkeypatch: pytest.MonkeyPatch, data: Path, right: bool
) -> None:
    verdicts = (CheckVerdict("it runs", True), CheckVerdict("it is fast", right, "do not wait for `it`"))
    monkeypatch.setattr("hotloop.apps.learn.checking.check", lambda *_, **__: Result(3, verdicts, "cpu", ""))
    done = learn("check", "3", "mine.py")
    assert done.exit_code == (0 if right else 1)
    assert "right  it runs" in done.stdout
    assert ("hint: do not wait for `it`" in done.stdout) is not right
    kept = json.loads(data.read_text())["exercises"]["3"]
    assert (kept["passed"], kept["right"], kept["of"]) == (right, 2 if right else 1, 2)
    as_json = json.loads(learn("check", "3", "mine.py", "--json").stdout)
    assert as_json["passed"] is right
    assert as_json["verdicts"][1]["hint"] == "do not wait for `it`"
    listed = learn().stdout
    assert ("passed" if right else "1 of 2 right") in listed


def test_the_quiz_takes_answers_from_a_pipe_and_explains(learn: Invoke) -> None:
    code = 'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")'
    done = learn("quiz", "1", answers=f"{code}\nd\n")
    assert done.exit_code == 0
    assert "Right." in done.stdout
    assert "Not so: c" in done.stdout
    assert "See `hotloop learn 1`" in done.stdout
    assert "1 right of 2 answers" in done.stdout
    assert json.loads(learn("--json").stdout)["quiz"]["right"] == 1
    again = learn("quiz", "1").stdout  # what was wrong comes first now
    assert "The machine has an NVIDIA GPU" in again
    assert "0 right of 0 answers" in again


class Terminal:
    """A pseudo-terminal of 80 columns, in which a person types."""

    def __init__(self, warm: Warm, folder: Path) -> None:
        self._warm, self._folder = warm, folder
        self._ours, self._theirs = os.openpty()
        os.set_blocking(self._ours, False)
        self.text = ""

    def begin(self, *args: str) -> Running:
        self.text = ""
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40"}
        name = os.ttyname(self._theirs)
        command = (*HOTLOOP, "learn", *args)
        return self._warm.start(*command, cwd=self._folder, environment=env, terminal=name, forks=True)

    def read_until(self, words: str, times: int = 1, timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while self.text.count(words) < times:
            assert time.monotonic() < end, f"{words!r} did not come:\n{self.text}"
            self.read()

    def read(self) -> None:
        """All that is there."""
        try:
            while True:
                self.text += os.read(self._ours, 100_000).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.01)

    def run(self, *args: str) -> int:
        """A command that asks nothing, to its end."""
        running = self.begin(*args)
        while psutil.Process(running.pid).status() != psutil.STATUS_ZOMBIE:  # it writes into a buffer of some kilobytes
            self.read()
        self.read()
        return running.wait()

    def type(self, words: str) -> None:
        os.write(self._ours, words.encode())

    def close(self) -> None:
        os.close(self._ours)
        os.close(self._theirs)

    def screen(self) -> list[str]:
        """What is to be seen, as a terminal shows it."""
        shown = pyte.Screen(80, 400)
        pyte.Stream(shown).feed(self.text)
        return [line.rstrip() for line in shown.display]


@pytest.fixture
def terminal(warm: Warm, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(warm, tmp_path)
    yield opened
    opened.close()


@pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals here")
def test_a_person_reads_a_lesson_breaks_fixes_is_checked_and_sees_progress(terminal: Terminal, tmp_path: Path) -> None:
    running = terminal.begin("3")
    for step in range(1, 9):  # Enter for each step
        terminal.read_until("ends the lesson:", step)
        terminal.type("\r")
    assert running.wait() == 0
    terminal.read_until("is done.")
    shown = terminal.screen()
    assert max(map(len, shown)) <= 80
    assert any("fix: images = images.to" in line for line in shown)
    assert any(line.startswith("  │ ") for line in shown)

    assert terminal.run("start", "6") == 0  # whose file needs no GPU: the simulated one takes a second to begin
    file = tmp_path / exercise(6).file.name
    assert terminal.run("check", "6") == 1
    assert "hint:" in terminal.text
    file.write_text(exercise(6).solution.read_text())
    assert terminal.run("check", "6") == 0
    assert "is solved" in terminal.text
    assert terminal.run() == 0
    rows = {line.split()[0]: line for line in terminal.screen() if re.match(r" *[36]  ", line)}
    assert "done" in rows["3"]
    assert "passed" in rows["6"]


@pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals here")
def test_a_step_can_be_skipped_and_the_lesson_left(terminal: Terminal, data: Path) -> None:
    running = terminal.begin("2")
    terminal.read_until("ends the lesson:")
    terminal.type("s\r")
    terminal.read_until("ends the lesson:", 2)
    terminal.type("q\r")
    assert running.wait() == 0
    terminal.read_until("begins the lesson again")
    assert json.loads(data.read_text())["lessons"] == {"2": "opened"}
    assert "│" not in terminal.text  # nothing was run


def test_help_teaches(learn: Invoke) -> None:
    told = learn("--help").stdout
    for words in ("hotloop learn 3", "hotloop learn check 3", "quiz", "start"):
        assert words in told
    for verb in ("start", "check", "quiz"):
        assert f"hotloop learn {verb}" in learn(verb, "--help").stdout


def test_the_list_starts_without_torch() -> None:
    import sys

    script = (
        "import sys; sys.argv = ['hotloop', 'learn']\nfrom hotloop.cli import main\ntry: main()\n"
        "finally: print('loaded:', 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "loaded: False" in done.stdout


def test_the_solution_is_printed_as_it_is(learn: Invoke) -> None:
    assert learn("solution", "3").stdout == exercise(3).solution.read_text()
    assert "there is no exercise 99" in str(learn("solution", "99").exception)
