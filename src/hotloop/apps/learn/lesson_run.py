"""The code of a lesson, run step by step in one namespace as a notebook runs its cells."""

import ast
import io
import linecache
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from hotloop.apps.learn.lesson import Lesson, Step

Write = Callable[[str], object]


@dataclass(frozen=True)
class StepOutput:
    """What a step printed, and the error that ended it."""

    output: str
    error: BaseException | None = None


class _Tee(io.TextIOBase):
    """Standard output that is kept, and shown as it comes."""

    def __init__(self, write: Write | None) -> None:
        self.kept = io.StringIO()
        self._write = write

    def write(self, words: str) -> int:
        self.kept.write(words)
        if self._write is not None:
            self._write(words)
        return len(words)


class Session:
    """Runs the steps of a lesson; what one defines the next ones know."""

    def __init__(self, lesson: Lesson) -> None:
        self._lesson = lesson
        self.namespace: dict[str, Any] = {"__name__": "__main__"}

    def run(self, step: Step, write: Write | None = None) -> StepOutput:
        """Run one step; `write` gets what it prints as it prints it. An error is printed as Python would."""
        tee = _Tee(write)
        error: BaseException | None = None
        name = f"<lesson {self._lesson.number}, step {step.number}>"
        linecache.cache[name] = (len(step.code), None, step.code.splitlines(keepends=True), name)
        with redirect_stdout(tee), warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.simplefilter("ignore", DeprecationWarning)  # of libraries, which a reader cannot change
            warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
            warnings.showwarning = lambda message, category, *_: print(f"{category.__name__}: {message}")
            try:
                self._execute(step.code, name)
            except Exception as raised:  # noqa: BLE001  # a lesson goes on after an error, which may be what it shows
                error = raised
                print(_words(raised))
        return StepOutput(tee.kept.getvalue(), error)

    def _execute(self, code: str, name: str) -> None:
        """The statements, and the value of the last one shown where it is an expression."""
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self.namespace)  # noqa: S102  # to run it is what a lesson is for
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), self.namespace)  # noqa: S307  # the same
            if value is not None:
                print(repr(value))
        sys.stdout.flush()


def _words(error: BaseException) -> str:
    """An error as Python shows it, without the frames inside torch and hotloop: a reader changes none of them."""
    shown = traceback.TracebackException.from_exception(error)
    shown.stack = traceback.StackSummary.from_list(
        [each for each in shown.stack if each.filename.startswith("<lesson")]
    )
    shown.__cause__ = shown.__context__ = None
    return "".join(shown.format()).rstrip()
