"""Every exercise: its solution passes, its starting file fails with a hint, typical wrong fixes get their own hints."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hotloop.apps.learn import check as check_in_a_cell
from hotloop.apps.learn.checking import Result, check
from hotloop.apps.learn.exercise import Exercise, exercise, exercises
from hotloop.apps.learn.judging import RUNS
from hotloop.errors import BadArgument

from ..processes import gone
from ..thorough import some


@dataclass(frozen=True)
class Wrong:
    """A typical wrong fix of an exercise: what it changes, and a part of the hint that it gets."""

    exercise: Exercise
    name: str
    hint: str
    of: str  # "solution" or "start": the file that is changed
    changes: Sequence[tuple[str, str]]  # old text, which is there once → new text

    def __str__(self) -> str:
        return f"{self.exercise.file.stem[:2]}_{self.name}"

    @property
    def source(self) -> str:
        file = self.exercise.solution if self.of == "solution" else self.exercise.file
        text = file.read_text(encoding="utf-8")
        for old, new in self.changes:
            assert text.count(old) == 1, f"{self}: {old!r} is there {text.count(old)} times"
            text = text.replace(old, new)
        return text


FOLDER = Path(__file__).parent / "wrong"
WRONG = [
    Wrong(each, name, **said)
    for each in exercises()
    for name, said in tomllib.loads((FOLDER / f"{each.file.stem}.toml").read_text(encoding="utf-8")).items()
]
FEW = [next(wrong for wrong in WRONG if wrong.exercise == each) for each in exercises()]  # enough for each change
EACH = pytest.mark.parametrize("chosen", exercises(), ids=lambda each: each.file.stem)


@pytest.fixture
def checked(warm_checks: None, tmp_path: Path) -> "Checked":
    return Checked(tmp_path)


class Checked:
    """Checks a file as a learner does: from a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, chosen: Exercise, source: str) -> Result:
        file = self._folder / chosen.file.name
        file.write_text(source, encoding="utf-8")
        return check(chosen, file)


def hints(result: Result) -> str:
    return "\n".join(verdict.hint for verdict in result.verdicts if not verdict.right)


@EACH
def test_the_solution_passes(chosen: Exercise, checked: Checked) -> None:
    result = checked(chosen, chosen.solution.read_text(encoding="utf-8"))
    assert result.passed, hints(result)
    assert len(result.verdicts) >= 3


@EACH
def test_the_starting_file_fails_with_a_hint_for_each_thing_that_is_not_right(
    chosen: Exercise, checked: Checked
) -> None:
    result = checked(chosen, chosen.file.read_text(encoding="utf-8"))
    assert not result.passed
    assert all(len(verdict.hint) > 20 for verdict in result.verdicts if not verdict.right)


def test_both_faults_of_the_golden_rule_are_open_in_the_starting_file(checked: Checked) -> None:
    chosen = next(each for each in exercises() if each.lesson == 3)
    result = checked(chosen, chosen.file.read_text(encoding="utf-8"))
    assert [verdict.what for verdict in result.verdicts if verdict.right] == ["the model is on the GPU"]


@pytest.mark.parametrize("wrong", some(WRONG, FEW), ids=str)
def test_a_typical_wrong_fix_gets_its_own_hint(wrong: Wrong, checked: Checked) -> None:
    result = checked(wrong.exercise, wrong.source)
    assert not result.passed
    assert wrong.hint in hints(result)


def test_every_exercise_has_three_wrong_fixes_and_no_two_have_the_same_hint() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == {each.file.stem for each in exercises()}
    assert len({wrong.source for wrong in WRONG}) == len(WRONG) == 62
    for each in exercises():
        mine = [wrong.hint for wrong in WRONG if wrong.exercise == each]
        assert len(mine) >= 3, each.file.name
        assert len(set(mine)) == len(mine), each.file.name


MISCHIEF = {
    "an endless loop": ("while True: pass\n", "a loop without an end?"),
    "a huge allocation": (
        "import torch\nkept = []\nwhile True:\n    kept.append(torch.ones(4_000_000))\n",
        "more than 700.0 MiB, and was ended.",
    ),
    "more than there is": ("import torch\nx = torch.ones(10**15)\n", "it asks for more memory than there is"),
    "sys.exit": ("import sys\nsys.exit(0)\n", "line 2: it ends itself with sys.exit()"),
    "os._exit": ("import os\nos._exit(3)\n", "exit code 3"),
    "input": ("name = input('who? ')\n", "line 1: it asks for input()"),
    "a deleted variable": ("x = 1\ndel x\nprint(x)\n", "line 3: name 'x' is not defined. Was the line"),
    "a syntax error": ("x = (1\n", "line 1 is no Python"),
    "a zero byte": ("x = 1\0\n", "it is no Python"),
    "an interrupt": ("raise KeyboardInterrupt\n", "line 1: KeyboardInterrupt"),
    "no recursion's end": ("def f(): return f()\nf()\n", "RecursionError"),
    "a module that is not there": ("import nothing_of_this_name\n", "nothing but torch and hotloop"),
    "nothing at all": ("", "the check looks at `evaluate`"),
}


@pytest.mark.parametrize("what", MISCHIEF)
def test_mischief_is_caught_and_explained(what: str, warm_checks: None, tmp_path: Path) -> None:
    source, words = MISCHIEF[what]
    file = tmp_path / "06_evaluation.py"
    file.write_text(source)
    result = check(exercise(6), file, limit=0.5 if "endless" in what else 20, memory=700 << 20)
    assert not result.passed
    assert words in hints(result)


def test_what_a_file_starts_ends_with_it_and_what_it_writes_is_gone(warm_checks: None, tmp_path: Path) -> None:
    file, told = tmp_path / "06_evaluation.py", tmp_path / "pid"
    file.write_text(
        "import subprocess, sys, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path('litter').write_text('here')\n"
        f"pathlib.Path({str(told)!r}).write_text(f'{{child.pid}} {{pathlib.Path.cwd()}}')\n"
    )
    result = check(exercise(6), file)
    assert result.verdicts[0].what == RUNS
    assert result.verdicts[0].right
    number, folder = told.read_text().split()
    assert gone([int(number)])
    assert not Path(folder).exists()
    assert not (tmp_path / "litter").exists()


def test_check_runs_the_file_in_the_current_folder(
    warm_checks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadArgument, match=r"there is no file 06_evaluation\.py"):
        check_in_a_cell(6)
    (tmp_path / "06_evaluation.py").write_text(exercise(6).solution.read_text())
    assert check_in_a_cell(6).passed
    assert "Exercise 6 is solved" in capsys.readouterr().out
