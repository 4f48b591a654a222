"""A lesson: one Markdown file, read into steps of text and code."""

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hotloop.errors import BadArgument
from hotloop.records import Record

LESSONS_FOLDER = Path(__file__).parent / "lessons"
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```[ \t]*$\n?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step(Record):
    """Some text and the code that it speaks of."""

    number: int  # from 1
    text: str  # Markdown
    code: str  # empty: nothing but text, as at the end of a lesson
    raises: bool = False  # the code ends in an error, which is what it shows


@dataclass(frozen=True)
class Lesson(Record):
    """One lesson."""

    number: int
    name: str  # of its file, such as 03-golden-rule
    title: str
    minutes: int
    needs: str
    steps: tuple[Step, ...]


def parse(name: str, text: str) -> Lesson:
    """A lesson from the text of its file.

    >>> front = "---\\ntitle: Two\\nminutes: 1\\nneeds: nothing\\n---\\n"
    >>> lesson = parse("01-two", front + "Add:\\n\\n```python\\n1 + 1\\n```\\n")
    >>> lesson.title, lesson.steps
    ('Two', (Step(number=1, text='Add:', code='1 + 1\\n', raises=False),))
    """
    _, front, body = text.split("---\n", 2)
    about = dict(line.split(": ", 1) for line in front.splitlines())
    steps: list[Step] = []
    start = 0
    for fence in _FENCE.finditer(body):
        language, *flags = fence["info"].split() or [""]
        if language != "python":
            continue
        if flags not in ([], ["raises"]):
            raise ValueError(f"{name}: a python block is marked {flags}; `raises` is the only mark there is")
        steps.append(Step(len(steps) + 1, body[start : fence.start()].strip(), fence["code"], bool(flags)))
        start = fence.end()
    if rest := body[start:].strip():
        steps.append(Step(len(steps) + 1, rest, ""))
    return Lesson(int(name[:2]), name, about["title"], int(about["minutes"]), about["needs"], tuple(steps))


@cache
def lessons() -> tuple[Lesson, ...]:
    """All lessons in their order."""
    return tuple(parse(file.stem, file.read_text(encoding="utf-8")) for file in sorted(LESSONS_FOLDER.glob("*.md")))


def lesson(number: int) -> Lesson:
    """The lesson with this number."""
    found = next((each for each in lessons() if each.number == number), None)
    if found is None:
        last = lessons()[-1].number
        raise BadArgument(
            f"there is no lesson {number}", fix=f"choose one from 1 to {last}; `hotloop learn` lists them"
        )
    return found


def wrapped(line: str, width: int) -> list[str]:
    """A line of output in lines that fit; words and commands stay whole."""
    indent = line[: len(line) - len(line.lstrip())] + "  "
    lines = textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return lines or [""]
