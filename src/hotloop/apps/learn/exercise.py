"""The exercises, one for each lesson: scripts to repair, their solutions and their checks."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hotloop.apps.learn.lesson import lesson
from hotloop.errors import OutputError
from hotloop.printing.text import printable

EXERCISES_FOLDER = Path(__file__).parent / "exercises"


@dataclass(frozen=True)
class Exercise:
    """A script to repair."""

    lesson: int
    file: Path  # the script as the learner gets it

    @property
    def solution(self) -> Path:
        return self.file.with_name(f"{self.file.stem}_solution.py")

    @property
    def check(self) -> Path:
        return self.file.with_name(f"{self.file.stem}_check.py")

    @property
    def task(self) -> str:
        """What is to be done: the docstring of the script."""
        return ast.get_docstring(ast.parse(self.file.read_text(encoding="utf-8"))) or ""


@cache
def exercises() -> tuple[Exercise, ...]:
    """All exercises in the order of their lessons."""
    files = (file for file in sorted(EXERCISES_FOLDER.glob("*.py")) if not file.stem.endswith(("_solution", "_check")))
    return tuple(Exercise(int(file.name[:2]), file) for file in files)


def exercise(number: int) -> Exercise:
    """The exercise of a lesson."""
    return exercises()[lesson(number).number - 1]


def start(chosen: Exercise, folder: Path) -> Path:
    """Copy the script to a learner's folder; what is there is never overwritten."""
    target = folder / chosen.file.name
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(chosen.file.read_text(encoding="utf-8"))
    except FileExistsError:
        name = printable(str(target))
        raise OutputError(
            f"{name} is there already, and is left as it is",
            fix=f"edit it and run `hotloop learn check {chosen.lesson}`; for a new start, rename or delete it first",
        ) from None
    return target
