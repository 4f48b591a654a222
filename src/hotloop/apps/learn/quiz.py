"""The quiz: questions as data, answered by a letter or by a line of code."""

import ast
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hotloop.errors import BadArgument

FILE = Path(__file__).with_name("quiz.toml")
LETTERS = "abcdef"


@dataclass(frozen=True)
class Question:
    """A question with `choices` and the letter of the right one, or one for a line of code."""

    key: str
    lesson: int
    text: str
    answer: str  # the right letter, or a line of code that is right
    why: str
    choices: tuple[str, ...] = ()
    right: tuple[str, ...] = ()  # patterns of all lines of code that are right

    def is_right(self, given: str) -> bool:
        """Whether an answer is right; anything may be given."""
        if self.choices:
            return given.strip().lower().rstrip(").") == self.answer
        line = _as_python_writes_it(given.strip().strip("`"))
        return any(re.fullmatch(each, line, re.DOTALL) for each in self.right)


def _as_python_writes_it(line: str) -> str:
    """One statement in the quotes and spaces of `ast.unparse`; empty where it is none.

    >>> _as_python_writes_it('x=x.to( "cuda" )')
    "x = x.to('cuda')"
    """
    try:
        tree = ast.parse(f"{line} pass" if line.endswith(":") else line)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ""
    return ast.unparse(tree) if len(tree.body) == 1 else ""


@cache
def questions() -> tuple[Question, ...]:
    """All questions in their order."""
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return tuple(
        Question(key, each["lesson"], each["text"], each["answer"], each["why"], tuple(each.get("choices", ())),
                 tuple(each.get("right", ())))
        for key, each in data.items()
    )  # fmt: skip


def about(lesson: int | None) -> tuple[Question, ...]:
    """The questions about one lesson, or all."""
    chosen = tuple(each for each in questions() if lesson in (None, each.lesson))
    if not chosen:
        have = ", ".join(map(str, sorted({each.lesson for each in questions()})))
        raise BadArgument(f"there is no question about lesson {lesson}", fix=f"choose one of {have}")
    return chosen
