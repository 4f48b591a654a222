"""A lesson in a terminal: text, code, Enter, and below it what the code prints on this machine."""

import time
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.markdown import Markdown
from rich.rule import Rule
from rich.syntax import Syntax
from rich.text import Text

import hotloop.printing.terminal  # noqa: F401  # the door to rich
from hotloop.apps.learn.lesson import Lesson, Step, wrapped
from hotloop.apps.learn.lesson_run import Session
from hotloop.printing.text import duration, printable, wrap

WIDEST = 100  # columns of text; longer lines are hard to read
BAR = "  │ "
PROMPT = "Enter runs it, s skips it, q ends the lesson: "

Ask = Callable[[], str]


def run_lesson(lesson: Lesson, where: Console, ask: Ask | None) -> bool:
    """Show and run a lesson; `ask` waits for the reader before each step, without one nothing waits.

    True where it was gone through to its end.
    """
    where.file = where.file  # this stream from now on: a step has a standard output of its own
    width = min(where.width, WIDEST)
    where.print(Rule(Text(f"{lesson.number}  {lesson.title}", style="bold"), align="left", style="dim"))
    for line in wrap(f"{lesson.minutes} minutes. Needs: {lesson.needs}.", width):
        where.print(Text(line, style="dim"))
    session = Session(lesson)
    steps = sum(bool(step.code) for step in lesson.steps)
    where.print()
    for step in lesson.steps:
        if step.text:
            _show(where, Markdown(step.text, code_theme="ansi_dark"), width)
            where.print()
        if not step.code:
            continue
        where.print(Rule(Text(f"step {step.number} of {steps}", style="dim"), align="left", style="dim"), width=width)
        _show(where, _code(step), width)
        answer = "" if ask is None else _answer(where, ask)
        if answer == "q":
            return False
        if answer != "s":
            _run(session, step, where, width)
        where.print()
    return True


def _answer(where: Console, ask: Ask) -> str:
    """What the reader wants: to run the step, to skip it, or to end."""
    where.print(Text(PROMPT, style="dim cyan"), end="")
    try:
        return ask().strip().lower()[:1]
    except EOFError:
        where.print()
        return "q"


def _show(where: Console, what: RenderableType, width: int) -> None:
    """Print without the spaces with which rich fills its lines: they would be copied along with the code."""
    for line in where.render_lines(what, where.options.update(width=width), pad=False):
        text = Text.assemble(*((part.text, part.style or "") for part in line))
        text.rstrip()
        where.print(text, soft_wrap=True)


def _code(step: Step) -> Syntax:
    return Syntax(step.code.rstrip("\n"), "python", theme="ansi_dark", background_color="default", word_wrap=True)


def _run(session: Session, step: Step, where: Console, width: int) -> None:
    lines = Lines(lambda line: where.print(Text.assemble((BAR, "dim green"), line), soft_wrap=True), width - len(BAR))
    start = time.perf_counter()
    outcome = session.run(step, lines.write)
    lines.end()
    seconds = time.perf_counter() - start
    if outcome.error is not None and not step.raises:
        where.print(Text("    This step failed here, and the lesson goes on.", style="yellow"))
    if seconds > 1:
        where.print(Text(f"    ({duration(seconds)})", style="dim"))


class Lines:
    """Takes output in pieces and gives it on in lines that fit."""

    def __init__(self, show: Callable[[str], object], width: int) -> None:
        self._show, self._width, self._rest = show, width, ""

    def write(self, words: str) -> None:
        *lines, self._rest = (self._rest + words).split("\n")
        for line in lines:
            self._line(line)

    def end(self) -> None:
        if self._rest:
            self._line(self._rest)
            self._rest = ""

    def _line(self, line: str) -> None:
        for part in wrapped(printable(line.rstrip("\r").expandtabs()), self._width):
            self._show(part)
