"""An unmodified script, looked at or timed for some steps, with other sources in place of its files.

Run as a program (`python -m hotloop.apps.doctor.examined_script`), so that each turn has a process of its own.
"""

import importlib.machinery
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch

from hotloop.apps.doctor.looking import ScriptLook
from hotloop.apps.doctor.timing import TimedEvaluation, TimedSteps
from hotloop.errors import INTERRUPTED
from hotloop.records import Record
from hotloop.scripts.as_main import shown_without
from hotloop.scripts.exchange import FAILED, Exchange
from hotloop.scripts.kept_files import FilesAside
from hotloop.scripts.training_steps import ScriptSteps, around

SEED = 0  # so that two turns of a script that sets no seed can be compared
_HERE = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class ScriptRun(Record):
    """A run that is asked for."""

    target: str  # a file, or the name of a module
    arguments: tuple[str, ...]
    module: bool
    warmup: int = 0
    steps: int = 0  # to be timed; 0 to look
    evaluation: bool = False  # time the evaluation after the warm-up instead of steps
    seconds: float = 2.0  # of steps to look at
    limit: float = 600.0  # seconds until the run is ended
    sources: dict[str, str] | None = None  # what files hold in this run, by their paths


def run(exchange: Exchange) -> int:
    """Run the script and write the answer; the exit code of the program."""
    request = ScriptRun.from_json(exchange.request)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)

    def tell() -> None:
        exchange.answer(watch.answer(has_ended=False))

    def stepped() -> bool:
        """The answer is written first: what the script does once it is told to end is its own affair."""
        is_enough = watch.step(script.device)
        if is_enough:
            tell()
        return is_enough

    def end() -> None:
        tell()
        script.end()

    watch: ScriptLook | TimedSteps | TimedEvaluation
    if request.evaluation:
        watch = TimedEvaluation(request.warmup, end)
    else:
        home = Path.cwd() if request.module else Path(request.target).resolve().parent
        watch = TimedSteps(request.warmup, request.steps) if request.steps else ScriptLook(request.seconds, home)
    script, sources = ScriptSteps(stepped), request.sources or {}
    source = None if request.module else sources.get(os.path.realpath(request.target))
    with watch.watching(), _in_place_of_files(sources):
        ending = script.run(request.target, request.arguments, module=request.module, source=source)
    sys.stdout.flush()
    error = _error(ending)
    if not script.is_ended:
        answer = watch.answer(has_ended=True)
        exchange.answer({**answer, "error": error or answer.get("error")})
    return INTERRUPTED if isinstance(ending, KeyboardInterrupt) else FAILED if error else 0


@contextmanager
def _in_place_of_files(sources: Mapping[str, str]) -> Iterator[None]:
    """Modules that are imported from these files run these sources."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
            path = os.path.realpath(loader.get_filename(name))
            if path in sources:
                return compile(sources[path], path, "exec", dont_inherit=True)
            found: CodeType | None = original(loader, name)
            return found

        return get_code

    with around(importlib.machinery.SourceFileLoader, "get_code", make):
        yield


def _error(ending: BaseException | None) -> str | None:
    """What ended the script, in a line; all of it goes to stderr."""
    if isinstance(ending, SystemExit) and ending.code not in (None, 0):
        return f"it ended itself with {ending.code!r}"
    if not isinstance(ending, Exception):
        return None
    words = "".join(shown_without(ending, _HERE).format())
    print(words, end="", file=sys.stderr)
    return words.strip().splitlines()[-1]


def main(exchange: Exchange) -> int:
    FilesAside().install(setattr)  # until the process ends: what is run at exit saves too
    return run(exchange)


if __name__ == "__main__":
    sys.exit(main(Exchange(Path(sys.argv[1]))))
