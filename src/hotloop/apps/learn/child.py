"""Runs a learner's file and judges it, in a process: `python -m hotloop.apps.learn.child FOLDER`."""

import importlib.util
import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType

import torch

from hotloop.apps.learn.checking import Result
from hotloop.apps.learn.exercise import exercise
from hotloop.apps.learn.judging import Ran, judge
from hotloop.apps.learn.lab import gpu
from hotloop.errors import HotloopError
from hotloop.scripts.as_main import run_as_main
from hotloop.scripts.exchange import Exchange

LONGEST_OUTPUT = 20_000  # characters of its output that are kept


def main() -> None:
    exchange = Exchange(Path(sys.argv[1]))
    try:
        data = judged(Path(exchange.request["file"]), exchange.request["lesson"]).to_json()
    except HotloopError as error:
        data = {"cannot": error.what, "fix": error.fix}
    exchange.answer(data)
    sys.stdout.flush()
    os._exit(0)  # threads and handlers of the file do not hold up the answer


def judged(file: Path, number: int) -> Result:
    """Run a file as the exercise asks for, and the verdicts about it."""
    module = _module(exercise(number).check)
    source = file.read_text(encoding="utf-8")
    before = None
    for on in module.ON:
        with _running(file, source, on, module) as ran:
            ran.cpu = before
            if on == module.ON[-1]:
                return _result(number, ran, module)
        before = ran
    raise AssertionError(f"{module.__name__} says not where its file is to run")


def _result(number: int, ran: Ran, module: ModuleType) -> Result:
    verdicts = judge(ran, module.check)
    where = "cpu" if ran.seen is None else f"{'a simulated ' if ran.seen.simulated else ''}{ran.seen.name}"
    return Result(number, tuple(verdicts), where, ran.output[-LONGEST_OUTPUT:])


def _module(file: Path) -> ModuleType:
    """The checks of an exercise; the file's name begins with a number, so that it cannot be imported by it."""
    spec = importlib.util.spec_from_file_location(f"hotloop_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _running(file: Path, source: str, on: str, module: ModuleType) -> Iterator[Ran]:
    """The file after it was run; in the block the GPU is still there, so that its tensors can be looked at."""
    ran = Ran(file, source, on)
    output, before = io.StringIO(), sys.stdout
    torch.manual_seed(0)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if on == "gpu":
            ran.seen = stack.enter_context(gpu(quiet=True))
        elif torch.cuda.is_available():
            stack.enter_context(_no_gpu())
        with module.watch() if hasattr(module, "watch") else nullcontext() as ran.watched:
            sys.stdout = output
            try:
                run_as_main(str(file), [])
            except BaseException as error:  # noqa: BLE001  # sys.exit and Ctrl-C of the file's own are explained too
                ran.error = error
                frames = traceback.extract_tb(error.__traceback__)
                ran.line = next((each.lineno for each in reversed(frames) if each.filename == str(file)), None)
            finally:
                sys.stdout = before
        ran.namespace = dict(sys.modules["__main__"].__dict__)
        ran.output = output.getvalue()
        if ran.seen is not None:
            ran.seen.settle()
        yield ran


@contextmanager
def _no_gpu() -> Iterator[None]:
    """What a machine without a GPU says."""
    before = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = before


if __name__ == "__main__":
    main()
