"""The lessons: every one runs, as its notebook has it, and what is made from them is up to date."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotloop.apps.learn import lab
from hotloop.apps.learn.exercise import exercise
from hotloop.apps.learn.lesson import Lesson, Step, lessons, parse
from hotloop.apps.learn.lesson_run import Session

from ..warm import stand_in

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("make", ROOT / "lessons" / "make.py")
assert spec is not None
make: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)  # type: ignore[union-attr]
CPU, GPU = make.read("cpu"), make.read("gpu")
EACH = pytest.mark.parametrize("each", lessons(), ids=lambda each: each.name)
# What the steps of a lesson must print on any machine, as regular expressions.
SHOWN = {
    1: [r"BadArgument: you asked for 'gpu'", r"a @ a, 1024 × 1024 +\d", r"holds tensor\(\[0., 2., 4., 6.\]"],
    2: [r"line 7: 1 copy to the device", r"y: \[10.0, .*\]  x: \[1.0, .*\]", r"line 5: the CPU waits 1 time"],
    3: [r"RuntimeError: .*device", r"DeviceMismatch: (?s:.*)fix: images = images.to\(", r"mismatches on the GPU: 0"],
    4: [r"mean: +cpu", r"LeftBehindWarning", r"momentum: cpu", r"momentum: cuda:0", r"Adam's state +7.7 MiB"],
    5: [r"line 32: the CPU waits 8 times", r"largest difference: \S+e-\d\d|largest difference: 0.0"],
    6: [r"eval mode, same output twice: +True", r"kept under no_grad +0 B", r"in training mode again: True"],
    7: [r"8 copies to the device, pinned: the CPU goes on", r"line 2: 2 copies to the device", r"the same loss: True"],
    8: [r"[\d,]+ times as fast", r"waits for 16 pixels: [13]\d", r"waits, vectorised: +[01]"],
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
def test_the_notebook_runs_and_shows_what_it_teaches(
    each: Lesson, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = from_notebook(each)
    if any("sys.executable" in step.code for step in notebook.steps):  # processes that would import torch
        monkeypatch.setattr("sys.executable", stand_in(tmp_path, request.getfixturevalue("warm").server))
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


def test_what_is_made_from_the_lessons_is_up_to_date_and_nothing_is_left_over() -> None:
    made = make.files(CPU, GPU)
    for file, text in made.items():
        assert file.read_text(encoding="utf-8") == text, f"{file} is out of date: python lessons/make.py build"
    written = {ROOT / name for name in ("lessons/make.py", "docs/lessons/index.md")}
    assert {*(ROOT / "lessons").glob("*.*"), *(ROOT / "docs" / "lessons").rglob("*.*")} <= {*made, *written}


def test_lessons_are_numbered_and_listed() -> None:
    index, menu = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/lessons/index.md", "mkdocs.yml"))
    for number, each in enumerate(lessons(), 1):
        file = exercise(number).file.name
        assert f"| {number} | [{each.title}]({each.name}.md) | {each.minutes} min | `{file}` |\n" in index
        assert f"      - {number}. {each.title}: lessons/{each.name}.md\n" in menu


def test_every_step_was_recorded_as_it_is_and_most_on_a_gpu_too() -> None:
    steps = [(each, step) for each in lessons() for step in each.steps if step.code]
    changed = [(each.number, step.number) for each, step in steps if make.output(CPU, each, step) is None]
    assert not changed, "steps have changed: python lessons/make.py record lessons/recorded/cpu.json N"
    assert GPU["gpu"] == lab.reference()["gpu"]
    assert sum(make.output(GPU, *each) is not None for each in steps) >= 0.8 * len(steps)  # a GPU is not always at hand


def test_a_recording_names_no_folder_of_its_machine() -> None:
    for file in (ROOT / "lessons" / "recorded").iterdir():
        text = file.read_text(encoding="utf-8").replace("/usr/lib/xorg", "").replace("/data/birds", "")  # both made up
        assert not re.findall(r"(?<![\w.…/:])/(?:[\w.-]+/)+[\w.-]+", text)


def test_rows_of_the_reference_are_rows_that_lessons_show() -> None:
    rows = lab.reference()["rows"]
    source = "".join(step.code for each in lessons() for step in each.steps)
    words = [row for row in rows if not any(part in source for part in (row, row.split(",")[0], row.split(" ")[-1]))]
    assert not words


FRONT = "---\ntitle: X\nminutes: 1\nneeds: nothing\n---\nA:\n"
THREE = parse(
    "01-x",
    FRONT
    + """
```python
from hotloop.apps.learn.lab import beside
beside({"a row": 0.5})
```

B:

```python
1 / 0
```

C:

```python raises
"no error"
```
""",
)


def test_what_steps_print_is_recorded_and_what_fails_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    first, fails, ends_well = (replace(THREE, steps=(step,)) for step in THREE.steps)
    made = make.run(first)
    assert [step["output"] for step in made["steps"]] == [["what   here", "a row  500 ms"]]
    assert made["rows"]["a row"] == "500 ms"
    assert make.output(made, THREE, THREE.steps[0]) == "what   here\na row  500 ms"
    for lesson, why in ((fails, "step 2: ZeroDivisionError"), (ends_well, "step 3: no error")):
        with pytest.raises(SystemExit, match=why):
            make.run(lesson)


def recorded(gpu: str, *outputs: str) -> dict[str, Any]:
    """A recording of lessons in which the steps printed this."""
    steps = [
        {"lesson": 1, "step": n, "code": make.digest(step), "seconds": 1.0, "output": said.split("\n")}
        for n, (step, said) in enumerate(zip(THREE.steps, outputs, strict=False), 1)
    ]
    return {"gpu": gpu, "threads": 2, "torch": "2.13.0", "date": "2026-01-02", "rows": {}, "steps": steps}


def test_one_lesson_that_is_recorded_again_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ran(command: list[str], **_: Any) -> None:
        Path(command[-1]).write_text(json.dumps(recorded("", f"lesson {command[-2]}")))

    monkeypatch.setattr(make.subprocess, "run", ran)
    kept, other = tmp_path / "kept.json", {**recorded("").copy(), "rows": {"another": "1 s"}}
    other["steps"] = [{"lesson": number, "step": 1, "output": ["before"]} for number in (1, 2)]
    kept.write_text(json.dumps(other))
    make.record(kept, [1])
    again = json.loads(kept.read_text())
    assert [each["output"] for each in again["steps"]] == [["lesson 1"], ["before"]]
    assert again["rows"] == {"another": "1 s"}


def test_pages_and_notebooks_show_what_was_printed_and_once_where_it_is_the_same() -> None:
    note = "(on a simulated X1: there is no CUDA GPU here)"
    cpu, gpu = recorded("", "cpu", "same", f"{note}\nline 7"), recorded("NVIDIA X1", "cuda:0", "same", "line 7")
    text = make.page(THREE, cpu, gpu)
    assert "on a CPU (2 threads, torch 2.13.0) and, where it differs, on an NVIDIA X1 (torch 2.13.0, 2026-" in text
    blocks = re.findall(r'```text title="(.*)"\n(.*)\n```', text)
    assert blocks == [
        ("Output on a CPU", "cpu"), ("Output on an NVIDIA X1", "cuda:0"), ("Output", "same"),
        ("Output on a simulated and on a real NVIDIA X1", "line 7"),
    ]  # fmt: skip
    alone = make.page(THREE, recorded("", "one", "two"), make.EMPTY)
    assert re.findall(r'```text title="(.*)"\n(.*)\n```', alone) == [("Output", "one"), ("Output", "two")]
    assert "differs" not in alone
    book = json.loads(make.printed_notebook(THREE, recorded("NVIDIA X1", "cuda:0", "")))
    assert "NVIDIA X1 with torch 2.13.0, 2026-01-02" in "".join(book["cells"][0]["source"])
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [1, 2, None]
    printed = {"name": "stdout", "output_type": "stream", "text": ["cuda:0\n"]}
    assert [cell["outputs"] for cell in cells] == [[printed], [], []]


def test_a_step_shows_its_last_value_its_warnings_and_its_own_lines_of_an_error() -> None:
    text = """
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
    made = parse("01-x", FRONT + text)
    session = Session(made)
    first, second = (session.run(step).output for step in made.steps)
    assert first == "UserWarning: careful\n21\n"
    assert '"<lesson 1, step 2>", line 2' in second
    assert "json/decoder.py" not in second
    assert "JSONDecodeError: Expecting" in second
    with pytest.raises(ValueError, match="only mark"):
        parse("01-x", FRONT + "```python fast\n1\n```\n")
