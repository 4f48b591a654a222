"""The pages of `hotloop learn --web` as HTML; what a learner wrote is text in them and nothing else."""

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from hotloop.apps.learn.checking import MEMORY, TIME
from hotloop.apps.learn.exercise import exercise, exercises
from hotloop.apps.learn.learner_progress import LearnerProgress, data_folder, draft_file
from hotloop.apps.learn.lesson import Lesson, lessons
from hotloop.apps.learn.quiz import LETTERS, Question, about, questions


@cache
def _markdown() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable("table")


def text(words: str) -> Markup:
    """Markdown of ours as HTML."""
    return Markup(_markdown().render(words))  # noqa: S704  # the renderer escapes


def inline(words: str) -> Markup:
    """One line of it.

    >>> inline("`x.to` *copies* <b>")
    Markup('<code>x.to</code> <em>copies</em> &lt;b&gt;')
    """
    return Markup(_markdown().renderInline(words))  # noqa: S704  # the same


@cache
def _pages() -> Environment:
    folder = files("hotloop.apps.learn").joinpath("site")
    loader = FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8"))
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"text": text, "inline": inline}
    return made


def _render(page: str, /, **facts: Any) -> str:
    limits = f"for at most {TIME:.0f} s and with at most {MEMORY >> 30} GiB of memory"
    return _pages().get_template(page).render(limits=limits, folder=_short(data_folder()), **facts)


def _short(path: Any) -> str:
    """A path with ~ for the home folder."""
    home = type(path).home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def score(progress: LearnerProgress) -> str:
    """How far the quiz is, in words."""
    known = {each.key for each in questions()}
    answered = known & set(progress.quiz)
    right = sum(progress.quiz[key] for key in answered)
    return f"{right} of {len(known)} answered right" if answered else f"{len(known)} questions"


def overview(progress: LearnerProgress) -> str:
    """The list of lessons."""
    tasks = {each.lesson for each in exercises()}
    rows = [
        {
            "lesson": each,
            "state": progress.lessons.get(str(each.number), ""),
            "exercise": _checked(progress, each.number) if each.number in tasks else None,
        }
        for each in lessons()
    ]
    done = sum(row["state"] == "done" for row in rows)
    solved = sum(row["exercise"] == "passed" for row in rows)
    following = next((each for each in lessons() if progress.lessons.get(str(each.number)) != "done"), lessons()[0])
    return _render(
        "overview.html", rows=rows, done=done, solved=solved, following=following, begun=bool(progress.lessons),
        score=score(progress),
    )  # fmt: skip


def _checked(progress: LearnerProgress, number: int) -> str:
    """What the last check of an exercise said, in words."""
    checked = progress.exercises.get(str(number))
    if checked is None:
        return ""
    return "passed" if checked["passed"] else f"{checked['right']} of {checked['of']} right"


def lesson_page(chosen: Lesson, progress: LearnerProgress, draft: str | None) -> str:
    """A lesson with its steps and its exercise; `draft` is what the learner has written so far."""
    task = exercise(chosen.number)
    start = task.file.read_text(encoding="utf-8")
    return _render(
        "lesson.html", lesson=chosen, of=len(lessons()), steps=sum(bool(step.code) for step in chosen.steps),
        start=start, draft=start if draft is None else draft, file=_short(draft_file(task)),
        name=task.file.name, checked=_checked(progress, chosen.number),
        state=progress.lessons.get(str(chosen.number), ""),
        before=next((each for each in lessons() if each.number == chosen.number - 1), None),
        after=next((each for each in lessons() if each.number == chosen.number + 1), None),
        asked=sum(each.lesson == chosen.number for each in questions()),
    )  # fmt: skip


def quiz(progress: LearnerProgress, number: int | None) -> str:
    """The questions, all or those about one lesson."""
    rows = [
        {"question": each, "choices": list(zip(LETTERS, each.choices, strict=False)),
         "known": progress.quiz.get(each.key)}
        for each in about(number)
    ]  # fmt: skip
    return _render("quiz.html", rows=rows, number=number, score=score(progress))


def answer_words(asked: Question) -> str:
    """The right answer, to be shown."""
    if asked.judge:
        return f"`{asked.answer}`"
    return asked.choices[LETTERS.index(asked.answer)]
