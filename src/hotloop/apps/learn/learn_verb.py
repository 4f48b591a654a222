"""`hotloop learn`: lessons that run, exercises that are checked, a quiz, and how far a learner is."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotloop.cli.help import Verb, Verbs, flowing
from hotloop.cli.options import Json
from hotloop.cli.output import console, print_json, say
from hotloop.errors import BadArgument
from hotloop.printing.text import plural, printable, wrap

if TYPE_CHECKING:
    from rich.console import Console

    from hotloop.apps.learn.quiz import Question

Number = Annotated[int, typer.Argument(metavar="N", help="The number of the lesson.")]


class Lessons(Verbs):
    """`hotloop learn 3` is `hotloop learn lesson 3`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, ["lesson", *args] if args and args[0].isdecimal() else args)


ABOUT = """Learn GPU training in PyTorch: lessons that run, checked exercises, a quiz.

From the first `torch.cuda.is_available()` to several GPUs. No GPU is needed: what only a GPU shows runs on a simulated
one, and says so. Without a number, it lists the lessons and your progress.

[bold]Examples[/bold]
  hotloop learn              [dim]the lessons, and how far you are[/dim]
  hotloop learn 3            [dim]lesson 3; Enter runs the next step[/dim]
  hotloop learn 3 --all      [dim]the same without waiting[/dim]
  hotloop learn start 3      [dim]its exercise, a script to repair[/dim]
  hotloop learn check 3      [dim]what is right, what is not, a hint[/dim]
  hotloop learn solution 3   [dim]a right version of it[/dim]
  hotloop learn quiz         [dim]questions, with explanations[/dim]
  hotloop learn --notebook   [dim]the lessons as notebooks, in JupyterLab[/dim]
"""

app = typer.Typer(cls=Lessons, help=flowing(ABOUT), invoke_without_command=True, rich_markup_mode="rich")


@app.callback()
def learn(
    ctx: typer.Context,
    as_json: Json = False,
    notebook: Annotated[
        bool, typer.Option("--notebook", help="Open them in JupyterLab; needs `pip install 'hotloop\\[learn]'`.")
    ] = False,
) -> None:
    if notebook and (as_json or ctx.invoked_subcommand not in (None, "lesson")):
        raise BadArgument(
            "--notebook opens lessons in JupyterLab and does nothing else",
            fix="write `hotloop learn --notebook`, or `hotloop learn --notebook 3` for lesson 3",
        )
    if ctx.invoked_subcommand is not None:
        return
    if notebook:
        from hotloop.apps.learn.jupyterlab import open_notebooks

        open_notebooks(None)
    else:
        _list(as_json=as_json)


def _list(*, as_json: bool) -> None:
    """The lessons, and how far the learner is."""
    from hotloop.apps.learn.exercise import exercise
    from hotloop.apps.learn.learner_progress import LearnerProgress, progress_file
    from hotloop.apps.learn.lesson import lessons
    from hotloop.apps.learn.quiz import questions

    progress = LearnerProgress.load()
    rows = [
        {
            "number": each.number,
            "title": each.title,
            "minutes": each.minutes,
            "lesson": progress.lessons.get(str(each.number), "not opened"),
            "exercise": exercise(each.number).file.name,
            "checked": progress.exercises.get(str(each.number)),
        }
        for each in lessons()
    ]
    known = {each.key for each in questions()}
    right = sum(good for key, good in progress.quiz.items() if key in known)
    score = {"right": right, "answered": len(known & set(progress.quiz)), "questions": len(known)}
    if as_json:
        print_json({"lessons": rows, "quiz": score, "file": str(progress_file())})
        return
    where = console()
    where.print(_table(rows))
    quiz = f"{right} right of {score['answered']} answered" if score["answered"] else "no question answered yet"
    say(where, f"Quiz: {quiz}, {plural(len(known), 'question')} in all: `hotloop learn quiz`")
    following = next((row["number"] for row in rows if row["lesson"] != "done"), rows[0]["number"])
    say(where, f"Next: `hotloop learn {following}`", style="bold")


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    styles = {"done": "green", "opened": "yellow", "not opened": "dim"}
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        kept = row["checked"] or {"passed": False, "of": 0}
        task = Text("passed" if kept["passed"] else "not checked", style="green" if kept["passed"] else "dim")
        if kept["of"] and not kept["passed"]:
            task = Text(f"{kept['right']} of {kept['of']} right", style="yellow")
        state = Text(row["lesson"], style=styles[row["lesson"]])
        table.add_row(f"{row['number']:>2}", row["title"], f"{row['minutes']} min", state, task)
    return table


@app.command("lesson", cls=Verb, hidden=True)
def lesson(
    ctx: typer.Context,
    number: Number,
    without_waiting: Annotated[
        bool, typer.Option("--all", help="Run all steps without waiting; the default without a terminal.")
    ] = False,
) -> None:
    """Run a lesson here: text, code, and what the code prints on your machine.

    [bold]Examples[/bold]
      hotloop learn 3
      hotloop learn 3 --all
      hotloop learn --notebook 3
    """
    from hotloop.apps.learn.learner_progress import LearnerProgress
    from hotloop.apps.learn.lesson import lesson as find
    from hotloop.apps.learn.lesson_terminal import run_lesson

    chosen, where = find(number), console()
    LearnerProgress.load().opened(number)
    if ctx.parent is not None and ctx.parent.params["notebook"]:
        from hotloop.apps.learn.jupyterlab import open_notebooks

        open_notebooks(number)
        return
    waits = not without_waiting and sys.stdin.isatty() and sys.stdout.isatty()
    finished = run_lesson(chosen, where, input if waits else None)
    where.print()
    if not finished:
        say(where, f"`hotloop learn {number}` begins the lesson again.")
        return
    LearnerProgress.load().done(number)
    say(where, f"Lesson {number} is done. Its exercise: `hotloop learn start {number}`", style="bold")


@app.command("start", cls=Verb)
def start(
    number: Number,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the file goes.")] = Path(),
) -> None:
    """Get the exercise of a lesson: a script that is broken or slow, to repair. Nothing is overwritten.

    [bold]Examples[/bold]
      hotloop learn start 3
      hotloop learn start 3 exercises/
    """
    from hotloop.apps.learn.exercise import exercise
    from hotloop.apps.learn.exercise import start as copy

    chosen, where = exercise(number), console()
    if not folder.is_dir():
        raise BadArgument(f"there is no folder {printable(str(folder))}", fix="make it first, or leave it out")
    file = copy(chosen, folder)
    say(where, f"{printable(str(file))} is yours to edit:", style="bold")
    for line in chosen.task.splitlines():
        say(where, line, indent="  ") if line else where.print()
    named = "" if folder == Path() else f" {printable(str(file))}"
    say(where, f"Then: `hotloop learn check {number}{named}`")


@app.command("check", cls=Verb)
def check(
    number: Number,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Your file.", show_default="the exercise's name, in this folder"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check your solution of an exercise: what is right, what is not, and a hint.

    The file runs with your permissions, on your GPU or a simulated one, in its own process group and temporary folder.
    It is ended after a minute, or if it takes more than 4 GiB of memory. The exit code is 0 if everything is right,
    else 1.

    [bold]Examples[/bold]
      hotloop learn check 3
      hotloop learn check 3 my_version.py
    """
    from hotloop.apps.learn.checking import check_and_keep
    from hotloop.apps.learn.verdicts import show_verdicts

    where = console(stderr=as_json)
    with where.status("running your file"):
        result = check_and_keep(number, file)
    if as_json:
        print_json({**result.to_json(), "passed": result.passed})
    else:
        show_verdicts(where, result)
    if not result.passed:
        raise typer.Exit(1)


@app.command("solution", cls=Verb)
def solution(number: Number) -> None:
    """Print a right version of an exercise; there are others.

    [bold]Examples[/bold]
      hotloop learn solution 3
    """
    from hotloop.apps.learn.exercise import exercise

    sys.stdout.write(exercise(number).solution.read_text(encoding="utf-8"))


@app.command("quiz", cls=Verb)
def quiz(
    number: Annotated[
        int | None, typer.Argument(metavar="N", help="Only questions about this lesson.", show_default="all lessons")
    ] = None,
) -> None:
    """Answer questions, with explanations: choices, and lines of code to write.

    Questions that you have not answered correctly come first. Ctrl-D ends the quiz.

    [bold]Examples[/bold]
      hotloop learn quiz
      hotloop learn quiz 3
    """
    from hotloop.apps.learn.learner_progress import LearnerProgress
    from hotloop.apps.learn.quiz import about

    known = LearnerProgress.load().quiz
    asked = sorted(about(number), key=lambda each: known.get(each.key, False))
    where = console()
    answers: list[bool] = []
    for place, question in enumerate(asked, 1):
        _ask(where, question, f"{place} of {len(asked)}")
        given = _answer()
        if given is None:
            break
        good = question.is_right(given)
        LearnerProgress.load().answered(question.key, good)
        answers.append(good)
        _explain(where, question, good)
    say(where, f"{sum(answers)} right of {plural(len(answers), 'answer')}", style="bold")


def _answer() -> str | None:
    """A line from the terminal or the pipe; None where there are no more."""
    try:
        return input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
    except EOFError:
        return None


def _ask(where: "Console", question: "Question", place: str) -> None:
    from rich.text import Text

    from hotloop.apps.learn.quiz import LETTERS

    where.print()
    say(where, f"{place}, lesson {question.lesson}", style="dim")
    for line in question.text.strip().splitlines():
        say(where, line, style="bold") if line else where.print()
    for letter, choice in zip(LETTERS, question.choices, strict=False):
        for line in wrap(f"{letter} {choice}", where.width, "  ", hanging="  "):
            where.print(Text(line), soft_wrap=True)
    say(where, "Which letter?" if question.choices else "Write the line of code:", style="dim")


def _explain(where: "Console", question: "Question", right: bool) -> None:
    said = "Right." if right else f"Not so: {question.answer}"
    say(where, said, style="green" if right else "yellow")
    say(where, f"{question.why} See `hotloop learn {question.lesson}`.")
