"""An unmodified script, looked at or timed for some steps, with other sources in place of its files.

Run as a program (`python -m hotloop.doctor.script`), so that each turn has a process of its own.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import torch
from torch import Tensor

from hotloop.clock import synchronize
from hotloop.doctor.looking import ScriptLook
from hotloop.doctor.record import Turn
from hotloop.files import write_json
from hotloop.records import Record
from hotloop.script_steps import ScriptSteps, around
from hotloop.scripts import shown_without

ANSWER, ASKED = "answer.json", "request.json"
FAILED, INTERRUPTED = 1, 130
LOOK, TURN = "look", "turn"  # of an answer
SEED = 0  # so that two turns of a script that sets no seed can be compared
_HERE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class ScriptRun(Record):
    """A run that is asked for."""

    target: str  # a file, or the name of a module
    arguments: tuple[str, ...]
    module: bool
    warmup: int = 0
    steps: int = 0  # to be timed; 0 to look
    seconds: float = 2.0  # of steps to look at
    limit: float = 600.0  # seconds until the run is ended
    sources: dict[str, str] | None = None  # what files hold in this run, by their paths

    @classmethod
    def read(cls, folder: Path) -> "ScriptRun":
        return cls.from_json(json.loads((folder / ASKED).read_text()))

    def write(self, folder: Path) -> None:
        """Write it to where the program reads it and puts its answer."""
        write_json(folder / ASKED, self.to_json())


class TimedSteps:
    """Times the steps after a warm-up, and collects the losses of all."""

    def __init__(self, warmup: int, steps: int) -> None:
        self._warmup, self._steps = warmup, steps
        self._made = 0
        self._begin = self._end = 0.0
        self._losses: list[Tensor] = []
        self._device = torch.device("cpu")
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self._undo.enter_context(around(torch.autograd, "backward", self._going_back))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def step(self) -> bool:
        self._made += 1
        if self._made not in (self._warmup, self._warmup + self._steps):
            return False
        synchronize(self._device)
        self._begin, self._end = self._end, time.perf_counter()
        return self._made > self._warmup

    def answer(self, *, has_ended: bool) -> dict[str, Any]:
        """The turn; None where the script ended before all of its steps were timed."""
        if has_ended:
            return {TURN: None, "steps": self._made}
        losses = tuple(float(loss) for loss in self._losses)
        return {TURN: Turn((self._end - self._begin) / self._steps, losses, self._memory_used()).to_json()}

    def _memory_used(self) -> int | None:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return int(psutil.Process().memory_info().rss) if self._device.type == "cpu" else None

    def _going_back(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def backward(tensors: Any, *args: Any, **options: Any) -> None:
            for loss in (tensors,) if isinstance(tensors, Tensor) else tensors:
                if loss.numel() == 1:
                    self._losses.append(loss.detach().clone())
                    self._device = loss.device
            original(tensors, *args, **options)

        return backward


def run(request: ScriptRun, folder: Path) -> int:
    """Run the script and write the answer; the exit code of the program."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    watch = TimedSteps(request.warmup, request.steps) if request.steps else ScriptLook(request.seconds)

    def stepped() -> bool:
        """The answer is written first: what the script does once it is told to end is its own affair."""
        is_enough = watch.step()
        if is_enough:
            write_json(folder / ANSWER, watch.answer(has_ended=False))
        return is_enough

    script = ScriptSteps(stepped, _silent)
    with watch:
        ending = script.run(request.target, request.arguments, module=request.module, sources=request.sources)
    sys.stdout.flush()
    error = _error(ending)
    if not script.is_ended:
        write_json(folder / ANSWER, {**watch.answer(has_ended=True), "calls": script.calls, "error": error})
    return INTERRUPTED if isinstance(ending, KeyboardInterrupt) else FAILED if error else 0


def _error(ending: BaseException | None) -> str | None:
    """What ended the script, in a line; all of it goes to stderr."""
    if isinstance(ending, SystemExit) and ending.code not in (None, 0):
        return f"it ended itself with {ending.code!r}"
    if not isinstance(ending, Exception):
        return None
    words = "".join(shown_without(ending, _HERE).format())
    print(words, end="", file=sys.stderr)
    return words.strip().splitlines()[-1]


def _silent(words: str) -> None:
    """The person sees what all turns say, not each."""


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0])
    return run(ScriptRun.read(folder), folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
