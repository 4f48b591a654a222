"""A lesson as a Jupyter notebook, the same to the byte each time it is written."""

import json
from typing import Any

from hotloop.learn.lesson import Lesson


def notebook(lesson: Lesson) -> str:
    """The notebook's file."""
    head = f"# {lesson.number}. {lesson.title}\n\n{lesson.minutes} minutes. Needs: {lesson.needs}"
    cells = [_cell("title", "markdown", head)]
    for step in lesson.steps:
        if step.text:
            cells.append(_cell(f"text-{step.number}", "markdown", step.text))
        if step.code:
            cells.append(_cell(f"step-{step.number}", "code", step.code.rstrip("\n"), raises=step.raises))
    about = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    book = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def _cell(name: str, kind: str, text: str, *, raises: bool = False) -> dict[str, Any]:
    # the tag is how Jupyter's own runners are told that an error is meant
    cell: dict[str, Any] = {
        "cell_type": kind,
        "id": name,
        "metadata": {"tags": ["raises-exception"]} if raises else {},
        "source": text.splitlines(keepends=True),
    }
    return cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []}
