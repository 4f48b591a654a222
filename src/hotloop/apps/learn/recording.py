"""What the lessons print on a machine, kept in a file: pages and notebooks show it."""

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from hotloop.apps.learn.lesson import Lesson, Step
from hotloop.apps.learn.steps import StepProcess
from hotloop.printing.text import duration, plural
from hotloop.records import Record

TIME = 120.0  # seconds of a step
MEMORY = 32 << 30  # bytes; CUDA's libraries take some of them
# On a GPU, the column with the figures of another run would stand beside each measurement.
ALONE = """
import torch
from hotloop.apps.learn import lab
if torch.cuda.is_available():
    lab.reference = lambda: {"gpu": "", "rows": {}}
"""
FACTS = """
import json, torch
from hotloop.apps.learn import lab
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
print(json.dumps({
    "gpu": gpu, "threads": torch.get_num_threads(), "torch": torch.__version__, "rows": lab.recorded,
}))
"""


@dataclass(frozen=True)
class RecordedStep(Record):
    """What one step printed."""

    lesson: int
    step: int
    code: str  # a digest: what other code printed is not shown
    seconds: float
    output: tuple[str, ...]  # lines
    problem: str = ""  # why this is not what the step is to show


@dataclass(frozen=True)
class Recording(Record):
    """What the lessons printed on one machine."""

    gpu: str = ""  # its name; empty where there was none
    threads: int = 0  # of PyTorch on the CPU
    torch: str = ""
    date: str = ""
    rows: dict[str, str] = field(default_factory=dict)  # measurements by their names
    steps: tuple[RecordedStep, ...] = ()

    @classmethod
    def read(cls, file: Path) -> Self:
        """Of a file; empty where there is none."""
        return cls.from_json(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else cls()

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def output(self, lesson: Lesson, step: Step) -> str | None:
        """What the step printed; None where that is not known."""
        for each in self.steps:
            if (each.lesson, each.step, each.code) == (lesson.number, step.number, _digest(step)) and not each.problem:
                return "\n".join(each.output)
        return None

    def seconds(self, lesson: Lesson) -> float:
        """Of all its steps."""
        return sum(each.seconds for each in self.steps if each.lesson == lesson.number)

    @property
    def machine(self) -> str:
        """In words.

        >>> Recording(gpu="NVIDIA H200").machine, Recording().machine
        ('an NVIDIA H200', 'a CPU')
        """
        return f"an {self.gpu}" if self.gpu else "a CPU"


def record(chosen: Sequence[Lesson], before: Recording) -> Recording:
    """Run lessons, each in a process of its own as for a reader, and tell how each ended.

    What `before` holds of other lessons stays, as far as it comes from the same device and version of PyTorch.
    """
    steps: list[RecordedStep] = []
    rows: dict[str, str] = {}
    about: dict[str, Any] = {}
    for lesson in chosen:
        process = StepProcess(lesson.number, limit=TIME, memory=MEMORY)
        try:
            _ask(process, lesson, ALONE)
            mine = [*_steps(process, lesson)]
            told = _ask(process, lesson, FACTS)
        finally:
            process.end()
        steps += mine
        if told:
            facts = json.loads(told.splitlines()[-1])
            rows |= facts.pop("rows")
            about = facts
        print(f"{lesson.number:>2}  {lesson.title}: {plural(len(mine), 'step')} in "
              f"{duration(sum(each.seconds for each in mine))}", flush=True)  # fmt: skip
        for each in mine:
            if each.problem:
                print(f"    step {each.step} failed: {each.problem}", flush=True)
    made = Recording(date=datetime.now(UTC).date().isoformat(), rows=rows, steps=tuple(steps), **about)
    if (before.gpu, before.torch) != (made.gpu, made.torch):
        return made
    numbers = {lesson.number for lesson in chosen}
    kept = [each for each in before.steps if each.lesson not in numbers]
    together = sorted([*kept, *steps], key=lambda each: (each.lesson, each.step))
    return replace(made, rows={**before.rows, **rows}, steps=tuple(together))


def _steps(process: StepProcess, lesson: Lesson) -> Iterator[RecordedStep]:
    for step in lesson.steps:
        if not step.code:
            continue
        words: list[str] = []
        end = process.run(step.number, step.code, words.append)
        output = clean("".join(words)).rstrip()
        problem = end.ended
        if not problem and (end.error is not None) != step.raises:
            problem = output.rpartition("\n")[2] if end.error else "no error, though it is to end in one"
        lines = tuple(line.rstrip() for line in output.splitlines())
        yield RecordedStep(lesson.number, step.number, _digest(step), round(end.seconds, 2), lines, problem)


def _ask(process: StepProcess, lesson: Lesson, code: str) -> str:
    """What code of ours prints there; it defines no name that the steps could see."""
    words: list[str] = []
    process.run(lesson.steps[0].number, f"exec({code!r}, {{}})", words.append)
    return "".join(words)


def _digest(step: Step) -> str:
    return sha256(step.code.encode()).hexdigest()[:12]


def clean(words: str) -> str:
    """Words without the folders of this machine, and without what libraries log with a time.

    >>> clean(f"{tempfile.gettempdir()}/hotloop-learn-x1/work/a.py and {sys.prefix}/lib/b.py")
    '…/a.py and …/lib/b.py'
    >>> clean("STAGE:2026-11-16 20:22:39 318:318 x.cpp:52] start\\n[W1116 20:22:39.1 y.cpp:1] no\\nprinted\\n")
    'printed\\n'
    """
    words = re.sub(r"^(?:[A-Z]+:\d{4}-\d\d-\d\d |\[?[IWE]\d{4} \d\d:).*\n", "", words, flags=re.MULTILINE)
    folders = {sys.prefix, sys.base_prefix, str(Path(__file__).parents[4]), str(Path.cwd()), str(Path.home())}
    for folder in sorted(folders - {"/", "/usr"}, key=len, reverse=True):
        words = words.replace(f"{folder}/", "…/")
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/[\w.-]+(/work)?", "…", words)
