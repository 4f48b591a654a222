"""A lesson as a page of the documentation, with what its code printed."""

import re
from collections.abc import Sequence

from hotloop.learn.exercise import exercises
from hotloop.learn.lesson import Lesson

_OUTPUT = re.compile(r'^```text title="Output"\n(.*?)^```\n', re.MULTILINE | re.DOTALL)
MADE = "<!-- made by `python -m hotloop.learn build` from src/hotloop/learn/lessons -->"


def page(lesson: Lesson, outputs: Sequence[str]) -> str:
    """The page; `outputs` are those of the steps that have code."""
    told = iter(outputs)
    parts = [
        MADE,
        f"# {lesson.number}. {lesson.title}",
        f"{lesson.minutes} minutes. Needs: {lesson.needs}. Run it: `hotloop learn {lesson.number}`.",
    ]
    for step in lesson.steps:
        parts += [step.text] if step.text else []
        if step.code:
            parts.append(f"```python\n{step.code}```")
            output = next(told, "").rstrip()
            parts += [f'```text title="Output"\n{output}\n```'] if output else []
    for exercise in (each for each in exercises() if each.lesson == lesson.number):
        parts.append(
            f"## Exercise\n\n{exercise.task}\n\n`hotloop learn start {lesson.number}` gives you the file, "
            f"`hotloop learn check {lesson.number}` runs and checks it. The file runs with your rights, in a process "
            "group and a temporary folder of its own, with a time limit and a limit on its memory."
        )
    return "\n\n".join(parts) + "\n"


def without_outputs(text: str) -> str:
    """A page as its source alone determines it."""
    return re.sub(r"\n{3,}", "\n\n", _OUTPUT.sub("", text))


def outputs_in(text: str, lesson: Lesson) -> list[str]:
    """The outputs that a page holds, one for each step with code; empty where it has none."""
    found = []
    for step in lesson.steps:
        if step.code:
            block = f"```python\n{step.code}```\n\n"
            after = text.partition(block)[2]
            output = _OUTPUT.match(after)
            found.append(output[1] if output else "")
    return found


def index(all_lessons: Sequence[Lesson]) -> str:
    """The page that lists the lessons."""
    tasks = {each.lesson: each for each in exercises()}
    rows = [
        f"| {each.number} | [{each.title}]({each.name}.md) | {each.minutes} min | "
        f"{f'`{tasks[each.number].file.name}`' if each.number in tasks else ''} |"
        for each in all_lessons
    ]
    return "\n".join([MADE, "", INDEX, "", "| | lesson | | exercise |", "|---|---|---|---|", *rows, ""])


INDEX = """# Lessons

From the first `torch.cuda.is_available()` to several GPUs. Everything runs on a laptop without a GPU: what only a GPU
shows is run on a [simulated one](../simulate.md), and says so.

```sh
hotloop learn            # the lessons, and how far you are
hotloop learn 3          # run lesson 3: Enter runs the next step
hotloop learn start 3    # get its exercise, a script to repair
hotloop learn check 3    # run your repair: what is right, what is not, and a hint
hotloop learn quiz       # questions with explanations
```

The same lessons are notebooks in `lessons/`. The outputs on these pages are those of a machine with two slow CPU cores
and no GPU; where a table has a column for a named GPU, that was measured there.

An exercise runs your file with your rights, in a process group and a temporary folder of its own, with a time limit and
a limit on its memory. Progress is kept in `~/.local/share/hotloop/learn.json`; `HOTLOOP_DATA` names another folder."""
