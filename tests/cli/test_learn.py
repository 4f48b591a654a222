"""`hotloop learn` as a person uses it: in a terminal, in a pipe, and from a program."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotloop.apps.learn.checking import Result
from hotloop.apps.learn.exercise import exercise
from hotloop.apps.learn.judging import CheckVerdict
from hotloop.cli import app

from .conftest import Terminal

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
    data = json.loads(learn("--json").stdout)
    assert [row["number"] for row in data["lessons"]] == list(range(1, 17))
    assert (data["quiz"]["right"], data["quiz"]["answered"]) == (0, 0)


def test_a_lesson_in_a_pipe_runs_through_without_a_question(learn: Invoke) -> None:
    done = learn("12")
    assert done.exit_code == 0
    assert "Enter runs it" not in done.stdout
    assert "held by others than 4242: 1166 MiB" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = json.loads(learn("--json").stdout)["lessons"]
    assert {row["number"]: row["lesson"] for row in rows}[12] == "done"


MISTAKES = {
    ("99",): "no lesson 99",
    ("start", "99"): "no lesson 99",
    ("check", "99"): "no lesson 99",
    ("solution", "99"): "no lesson 99",
    ("quiz", "99"): "no question about lesson 99",
    ("start", "3", "nowhere"): "no folder nowhere",
    ("check", "3"): "no file 03_golden_rule.py\n  fix: `hotloop learn start 3`",
}


@pytest.mark.parametrize(("args", "told"), MISTAKES.items(), ids=[" ".join(args) for args in MISTAKES])
def test_a_mistake_is_told_with_what_to_do(learn: Invoke, args: tuple[str, ...], told: str) -> None:
    done = str(learn(*args).exception)
    assert told in done
    assert "fix:" in done


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
    assert learn("solution", "3").stdout == exercise(3).solution.read_text()


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


@pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals here")
def test_a_person_reads_a_lesson_breaks_fixes_is_checked_and_sees_progress(terminal: Terminal, tmp_path: Path) -> None:
    running = terminal.begin("learn", "3")
    for step in range(1, 9):  # Enter for each step
        terminal.read_until("ends the lesson:", step)
        terminal.type("\r")
    assert running.wait() == 0
    terminal.read_until(r"is done\.")
    shown = terminal.screen()
    assert max(map(len, shown)) <= 80
    assert any("fix: images = images.to" in line for line in shown)
    assert any(line.startswith("  │ ") for line in shown)

    assert (
        terminal.run("learn", "start", "6") == 0
    )  # whose file needs no GPU: the simulated one takes a second to begin
    file = tmp_path / exercise(6).file.name
    assert terminal.run("learn", "check", "6") == 1
    assert "hint:" in terminal.text
    file.write_text(exercise(6).solution.read_text())
    assert terminal.run("learn", "check", "6") == 0
    assert "is solved" in terminal.text
    assert terminal.run("learn") == 0
    rows = {line.split()[0]: line for line in terminal.screen() if re.match(r" *[36]  ", line)}
    assert "done" in rows["3"]
    assert "passed" in rows["6"]


@pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals here")
def test_a_step_can_be_skipped_and_the_lesson_left(terminal: Terminal, data: Path) -> None:
    running = terminal.begin("learn", "2")
    terminal.read_until("ends the lesson:")
    terminal.type("s\r")
    terminal.read_until("ends the lesson:", 2)
    terminal.type("q\r")
    assert running.wait() == 0
    terminal.read_until("begins the lesson again")
    assert json.loads(data.read_text())["lessons"] == {"2": "opened"}
    assert "│" not in terminal.text  # nothing was run
