"""A learner's file is run and judged: in a process group of its own, within a time, within a memory."""

import ast
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import psutil

from hotloop.apps.learn.exercise import Exercise, exercise
from hotloop.apps.learn.judging import RUNS, CheckVerdict
from hotloop.apps.learn.learner_progress import LearnerProgress
from hotloop.errors import BadArgument, HotloopError
from hotloop.printing import markup
from hotloop.printing.text import duration, printable, size
from hotloop.records import Record
from hotloop.scripts.children import Child
from hotloop.scripts.exchange import Exchange

TIME = 60.0  # seconds
MEMORY = 4 << 30  # bytes in memory, of the file's process and all that it started
LOOK = 0.05  # seconds between two looks at its memory


@dataclass(frozen=True)
class Result(Record):
    """What the check of a file says."""

    lesson: int
    verdicts: tuple[CheckVerdict, ...]
    device: str  # where it ran; empty where it did not
    output: str  # what it printed, the end of it

    @property
    def right(self) -> int:
        return sum(verdict.right for verdict in self.verdicts)

    @property
    def passed(self) -> bool:
        return all(verdict.right for verdict in self.verdicts)

    def __str__(self) -> str:
        """
        >>> print(Result(3, (CheckVerdict("it runs", True), CheckVerdict("it is fast", False)), "cpu", ""))
        exercise 3: 1 of 2 right
        """
        return f"exercise {self.lesson}: {self.right} of {len(self.verdicts)} right"

    __repr__ = __str__  # `check` has shown the verdicts

    def _repr_html_(self) -> str:
        return markup.box(markup.line(self, strong=True))


def check_and_keep(number: int, file: Path | None = None) -> Result:
    """Check the exercise of a lesson, in the learner's file or in that of its name here, and keep how it went."""
    chosen = exercise(number)
    result = check(chosen, file or Path(chosen.file.name))
    LearnerProgress.load().checked(number, result.right, len(result.verdicts))
    return result


def check(chosen: Exercise, file: Path, *, limit: float = TIME, memory: int = MEMORY) -> Result:
    """Run a learner's file and say what is right, what is not, and a hint."""
    source = _source(file, chosen)
    try:
        ast.parse(source)
    except (SyntaxError, ValueError) as error:  # the latter: a zero byte
        return _failed(chosen, _syntax(error, source))
    with tempfile.TemporaryDirectory(prefix="hotloop-learn-", ignore_cleanup_errors=True) as folder:
        exchange, said = Exchange(Path(folder)), Path(folder, "stderr")
        exchange.ask({"file": str(file.resolve()), "lesson": chosen.lesson})
        cwd = Path(folder, "work")
        cwd.mkdir()
        with said.open("w", encoding="utf-8") as stderr:
            streams = {"stdin": DEVNULL, "stdout": DEVNULL, "stderr": stderr}
            with Child(exchange.command("hotloop.apps.learn.child"), grace=0.0, cwd=cwd, **streams) as child:
                code, why = _watched(child, limit, memory)
                if why:
                    return _failed(chosen, why)
        return _read(chosen, exchange.answered, code, said)


def _source(file: Path, chosen: Exercise) -> str:
    name = printable(str(file))
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        fix = f"`hotloop learn start {chosen.lesson}` gives you the file to repair"
        raise BadArgument(f"there is no file {name}", fix=fix) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument(f"{name} cannot be read: {error}", fix="give a Python file in UTF-8") from error


def _syntax(error: SyntaxError | ValueError, source: str) -> str:
    line = getattr(error, "lineno", None)
    if line is None:
        return f"it is no Python: {error}"
    lines = source.splitlines()
    shown = f": {lines[line - 1].strip()}" if 0 < line <= len(lines) else ""
    return f"line {line} is no Python ({getattr(error, 'msg', error)}){shown}"


def _watched(child: Child, limit: float, memory: int) -> tuple[int | None, str]:
    """The exit code, or why the process must end."""
    end = time.monotonic() + limit
    while (code := child.wait(LOOK)) is None:
        if time.monotonic() > end:
            return None, f"it was still running after {duration(limit)} and was ended: a loop without an end?"
        if (taken := _memory_of(child.pid)) > memory:
            return None, f"it took {size(taken)} of memory, more than {size(memory)}, and was ended."
    return code, ""


def _memory_of(leader: int) -> int:
    """Bytes in memory of a process and all that it started."""
    taken = 0
    with suppress(psutil.Error):
        process = psutil.Process(leader)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                taken += each.memory_info().rss
    return taken


def _failed(chosen: Exercise, hint: str) -> Result:
    return Result(chosen.lesson, (CheckVerdict(RUNS, False, hint),), "", "")


def _read(chosen: Exercise, data: dict[str, Any] | None, code: int | None, said: Path) -> Result:
    if data is None:
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        last = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        told = f": {printable(last[0])}" if last else ""
        hint = f"its process ended with {how} before it could be looked at{told}; does it call os._exit or os.kill?"
        return _failed(chosen, hint)
    if "cannot" in data:
        raise HotloopError(data["cannot"], fix=data["fix"])
    return Result.from_json(data)
