"""The lessons: every one runs, as its notebook has it, and what is made from them is up to date."""

import json
import re
from pathlib import Path

import pytest

from hotloop.learn import lab
from hotloop.learn.__main__ import files, outputs_of
from hotloop.learn.exercise import exercises
from hotloop.learn.lesson import Lesson, Step, lesson, lessons, parse
from hotloop.learn.page import outputs_in, without_outputs
from hotloop.learn.running import Session

ROOT = Path(__file__).parents[2]
EACH = pytest.mark.parametrize("each", lessons(), ids=lambda each: each.name)
# What the steps of a lesson must print on any machine, as regular expressions.
SHOWN = {
    1: [r"BadArgument: you asked for 'gpu'", r"a @ a, 1024 × 1024 +\d", r"holds tensor\(\[0., 2., 4., 6.\]"],
    2: [r"line 7: 1 copy to the device", r"y: \[10.0, .*\]  x: \[1.0, .*\]", r"line 5: the CPU waits 1 time"],
    3: [r"RuntimeError: .*device", r"DeviceMismatch: (?s:.*)fix: images = images.to\(", r"mismatches on the GPU: 0"],
    4: [r"mean: +cpu", r"LeftBehindWarning", r"momentum: cpu", r"momentum: cuda:0", r"Adam's state +7.7 MiB"],
    5: [r"line 31: the CPU waits 8 times", r"largest difference: \S+e-\d\d|largest difference: 0.0"],
    6: [r"eval mode, same output twice: +True", r"kept under no_grad +0 B", r"in training mode again: True"],
    7: [r"8 copies to the device, pinned: the CPU goes on", r"line 2: 2 copies to the device", r"the same loss: True"],
    8: [r"[\d,]+ times as fast", r"waits for 16 pixels: 1\d", r"waits, vectorised: +[01]"],
    9: [r"after empty_cache +allocated +\S", r"out of memory. Tried", r"differ by \de-\d\d"],
    10: [r"1e-08: fp16 0, bf16", r"[1-9] of 30 steps were skipped", r"peak under bf16 autocast +\d"],
    11: [r"aten::uniform_", r"waiting for data +\d", r"a step, its batch is kept +\d"],
    12: [r"held by others than 4242: 1166 MiB", r"\d+ samples in"],
    13: [r"scaled: graphs 2\nscaled_at_once: graphs 1", r"17 items: compiled\n23 items: reused"],
    14: [r"both processes have the same weights: True", r"one process: \de-0[789]"],
    15: [r"a product, done", r"\d+ repeats\)"],
    16: [r"4 loop.fit +[\d,]+/s █+", r"'accuracy': (0\.[7-9]|1)"],
}  # fmt: skip


def from_notebook(each: Lesson) -> Lesson:
    """The lesson as its notebook has it."""
    book = json.loads((ROOT / "lessons" / f"{each.name}.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    steps = [
        Step(number, "", "".join(cell["source"]) + "\n", "raises-exception" in cell["metadata"].get("tags", []))
        for number, cell in enumerate(cells, 1)
    ]
    return Lesson(each.number, each.name, each.title, each.minutes, each.needs, tuple(steps))


@EACH
def test_the_notebook_runs_and_shows_what_it_teaches(each: Lesson) -> None:
    notebook = from_notebook(each)
    session = Session(notebook)
    outcomes = [(step, session.run(step)) for step in notebook.steps]
    failed = [
        f"step {step.number}: {told.output}" for step, told in outcomes if (told.error is not None) != step.raises
    ]
    assert not failed, failed[0]
    output = "".join(told.output for _, told in outcomes)
    for pattern in SHOWN[each.number]:
        assert re.search(pattern, output), pattern


@EACH
def test_a_lesson_is_short_and_fits_a_terminal(each: Lesson) -> None:
    code = [step for step in each.steps if step.code]
    assert 5 <= len(code) <= 12
    assert max(len(line) for step in code for line in step.code.splitlines()) <= 79
    assert any("beside(" in step.code for step in code) or each.number in (3, 12, 14)  # which measure nothing
    assert any(task.lesson == each.number for task in exercises())


def test_lessons_are_numbered_from_one_on() -> None:
    assert [each.number for each in lessons()] == list(range(1, 17))


def test_what_is_made_from_the_lessons_is_up_to_date() -> None:
    for file, text in files(ROOT).items():
        is_page = file.suffix == ".md"
        there = file.read_text(encoding="utf-8")
        same = without_outputs(there) == without_outputs(text) if is_page else there == text
        assert same, f"{file} is out of date: python -m hotloop.learn build"


@EACH
def test_the_page_keeps_what_the_steps_have_printed(each: Lesson) -> None:
    page = (ROOT / "docs" / "lessons" / f"{each.name}.md").read_text(encoding="utf-8")
    outputs = outputs_in(page, each)
    assert len(outputs) == sum(bool(step.code) for step in each.steps)
    assert sum(map(bool, outputs)) >= 4


def test_nothing_is_left_over() -> None:
    made = {file.relative_to(ROOT) for file in files(ROOT)}
    there = [*(ROOT / "lessons").rglob("*.*"), *(ROOT / "docs" / "lessons").rglob("*.*")]
    assert {file.relative_to(ROOT) for file in there} <= made


def test_rows_of_the_reference_are_rows_that_lessons_show() -> None:
    rows = lab.reference()["rows"]
    source = "".join(step.code for each in lessons() for step in each.steps)
    words = [row for row in rows if not any(part in source for part in (row, row.split(",")[0], row.split(" ")[-1]))]
    assert not words


def test_an_error_that_no_step_meant_is_found(tmp_path: Path) -> None:
    broken = parse("01-x", "---\ntitle: X\nminutes: 1\nneeds: nothing\n---\nNow:\n\n```python\n1 / 0\n```\n")
    with pytest.raises(SystemExit, match="lesson 1, step 1"):
        outputs_of(broken)


def test_a_step_shows_its_last_value_its_warnings_and_its_own_lines_of_an_error() -> None:
    text = """---
title: X
minutes: 1
needs: nothing
---
A:

```python
import warnings
warnings.warn("careful")
x = 20
x + 1
```

```python raises
import json
json.loads("{")
```
"""
    made = parse("01-x", text)
    session = Session(made)
    first, second = (session.run(step).output for step in made.steps)
    assert first == "UserWarning: careful\n21\n"
    assert '"<lesson 1, step 2>", line 2' in second
    assert "json/decoder.py" not in second
    assert "JSONDecodeError: Expecting" in second


def test_a_lesson_that_does_not_exist_is_told() -> None:
    from hotloop.errors import BadArgument

    with pytest.raises(BadArgument, match="no lesson 99"):
        lesson(99)


def test_a_mark_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="only mark"):
        parse("01-x", "---\ntitle: X\nminutes: 1\nneeds: nothing\n---\nA\n\n```python fast\n1\n```\n")
