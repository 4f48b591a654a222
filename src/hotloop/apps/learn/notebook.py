"""A lesson as a Jupyter notebook, the same to the byte each time it is written."""

import json
from typing import Any

from hotloop.apps.learn.exercise import exercise
from hotloop.apps.learn.lesson import Lesson
from hotloop.apps.learn.recording import Recording

EXERCISE = """## Exercise

{task}

Edit `{file}` beside this notebook; where it is not there, `hotloop learn start {number}` in a terminal copies it to the
current folder. Then check it in a cell:

```python
from hotloop.apps.learn import check

check({number})
```"""


def notebook(lesson: Lesson, gpu: Recording) -> str:
    """The notebook's file, with what its cells printed on a GPU as far as that was recorded."""
    head = f"# {lesson.number}. {lesson.title}\n\n{lesson.minutes} minutes. Needs: {lesson.needs}"
    if any(gpu.output(lesson, step) for step in lesson.steps):
        head += f"\n\nThe outputs were recorded on {gpu.machine} with torch {gpu.torch}, {gpu.date}."
    cells = [_cell("title", "markdown", head)]
    for step in lesson.steps:
        if step.text:
            cells.append(_cell(f"text-{step.number}", "markdown", step.text))
        if step.code:
            cell = _cell(f"step-{step.number}", "code", step.code.rstrip("\n"))
            if step.raises:  # how Jupyter's own runners are told that an error is meant
                cell["metadata"] = {"tags": ["raises-exception"]}
            output = gpu.output(lesson, step)
            cell["execution_count"] = None if output is None else step.number
            cell["outputs"] = [_printed(output)] if output else []
            cells.append(cell)
    task = exercise(lesson.number)
    words = EXERCISE.format(task=task.task, number=lesson.number, file=task.file.name)
    cells.append(_cell("exercise", "markdown", words))
    about = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    book = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def _cell(name: str, kind: str, text: str) -> dict[str, Any]:
    return {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(keepends=True)}


def _printed(output: str) -> dict[str, Any]:
    return {"name": "stdout", "output_type": "stream", "text": f"{output}\n".splitlines(keepends=True)}
