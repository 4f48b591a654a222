"""What the lessons print on a machine, kept in a file: pages and notebooks show it."""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, Self

from hotloop.apps.learn.lesson import Lesson, Step
from hotloop.apps.learn.lesson_run import Session
from hotloop.files.whole import write_json
from hotloop.printing.text import duration, plural
from hotloop.records import Record
from hotloop.scripts.as_main import interpreter
from hotloop.scripts.children import Child

TIME = 1200.0  # seconds of a lesson
LESSON, OUTPUT, TOLD = "lesson.json", "output", "told.json"  # files between `record` and the process of a lesson


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
    """Run lessons, each in a process and a temporary folder of its own, and tell how each ended.

    What `before` holds of other lessons stays, as far as it comes from the same device and version of PyTorch.
    """
    steps: list[RecordedStep] = []
    rows: dict[str, str] = {}
    about: dict[str, Any] = {}
    for lesson in chosen:
        told = _run_apart(lesson)
        mine = [*_steps(lesson, told.get("steps", []))]
        steps += mine
        rows |= told.get("rows", {})
        about = told.get("about", about)
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


def _run_apart(lesson: Lesson) -> dict[str, Any]:
    """What the process that runs a lesson has told by its end, or by the end of its time."""
    with tempfile.TemporaryDirectory(prefix="hotloop-learn-", ignore_cleanup_errors=True) as folder:
        work = Path(folder, "work")
        work.mkdir()
        write_json(Path(folder, LESSON), lesson.to_json())
        command = [*interpreter("hotloop.apps.learn.recording"), folder]
        with (
            Path(folder, OUTPUT).open("wb") as out,
            Child(command, grace=0.0, cwd=work, stdin=DEVNULL, stdout=out, stderr=out) as child,
        ):
            child.wait(TIME)
        told = Path(folder, TOLD)
        return json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}


def _steps(lesson: Lesson, told: list[dict[str, Any]]) -> Iterator[RecordedStep]:
    """Each step of the lesson with what was told of it."""
    ends = {each["step"]: each for each in told}
    for step in lesson.steps:
        if not step.code:
            continue
        end = ends.get(step.number)
        if end is None:
            problem = f"the process ended before it, or the lesson took more than {duration(TIME)}"
            yield RecordedStep(lesson.number, step.number, _digest(step), 0.0, (), problem)
            continue
        output = clean(end["output"]).rstrip()
        problem = ""
        if end["error"] is not step.raises:
            problem = output.rpartition("\n")[2] if end["error"] else "no error, though it is to end in one"
        lines = tuple(line.rstrip() for line in output.splitlines())
        yield RecordedStep(lesson.number, step.number, _digest(step), round(end["seconds"], 2), lines, problem)


def main() -> None:
    """Run one lesson, as `record` has it run in a process: `python -m hotloop.apps.learn.recording FOLDER`.

    What its steps print, and what the processes that they start print, goes to the file that is standard output here.
    """
    import torch  # noqa: PLC0415  # what is imported here is not part of the first step's time

    from hotloop.apps.learn import lab  # noqa: PLC0415

    folder = Path(sys.argv[1])
    lesson = Lesson.from_json(json.loads((folder / LESSON).read_text(encoding="utf-8")))
    about = {"gpu": "", "threads": torch.get_num_threads(), "torch": torch.__version__}
    if torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
        lab.REFERENCE = folder / "none"  # or the figures of another run would stand beside these
    session, steps = Session(lesson), []
    for step in lesson.steps:
        if not step.code:
            continue
        printed, begun = os.fstat(1).st_size, time.perf_counter()
        error = session.run(step, _write).error
        seconds = time.perf_counter() - begun
        sys.stdout.flush()
        sys.stderr.flush()
        output = (folder / OUTPUT).read_bytes()[printed:].decode("utf-8", errors="replace")
        steps.append({"step": step.number, "output": output, "error": error is not None, "seconds": seconds})
        write_json(folder / TOLD, {"steps": steps, "rows": lab.recorded, "about": about})


def _write(words: str) -> None:
    """To the file itself, so that words of Python and of other processes come in their order."""
    rest = memoryview(words.encode("utf-8", errors="replace"))
    while rest:
        rest = rest[os.write(1, rest) :]


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


if __name__ == "__main__":
    main()
