"""A lesson as a Jupyter notebook, the same to the byte each time it is written."""

import json
from typing import Any

from hotloop.apps.learn.exercise import exercise
from hotloop.apps.learn.lesson import Lesson

EXERCISE = """## Exercise

{task}

Edit `{file}` beside this notebook; where it is not there, `hotloop learn start {number}` in a terminal copies it to the
current folder. Then check it in a cell:

```python
from hotloop.apps.learn import check

check({number})
```"""


def notebook(lesson: Lesson) -> str:
    """The notebook's file; `lessons/make.py` writes the project's own, with what the cells print on a GPU."""
    head = f"# {lesson.number}. {lesson.title}\n\n{lesson.minutes} minutes. Needs: {lesson.needs}"
    cells = [_cell("title", "markdown", head)]
    for step in lesson.steps:
        if step.text:
            cells.append(_cell(f"text-{step.number}", "markdown", step.text))
        if step.code:
            cell = _cell(f"step-{step.number}", "code", step.code.rstrip("\n"))
            if step.raises:  # how Jupyter's own runners are told that an error is meant
                cell["metadata"] = {"tags": ["raises-exception"]}
            cells.append(cell | {"execution_count": None, "outputs": []})
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
