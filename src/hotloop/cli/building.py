"""FILE.py:FUNCTION: the training loop that a function in a person's own file builds."""

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hotloop import Loop, pick
from hotloop.errors import BadArgument, HotloopError
from hotloop.printing.text import an, printable, shorten


class Built(NamedTuple):
    """What the function returned."""

    loop: Loop
    loader: Any
    settings: dict[str, Any]  # arguments of `Loop.fit`


def build(target: str, device: str | None = None) -> Built:
    """Import the file as Python would, and call the function; its loop runs on `device` unless it names another."""
    file, function = file_and_function(target)
    if device is not None:
        pick(device)  # one that is not here is told as what was asked for
        os.environ["HOTLOOP_DEVICE"] = device  # for a file that builds its own loop
    made_by = f"{printable(function)}()"
    with _by_itself(file), explained(target):
        made = _function(file, function)()
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], Loop)):
        raise BadArgument(f"{made_by} returned {an(type(made).__name__)}", fix="return (hotloop.Loop(...), loader)")
    settings = made[2] if len(made) == 3 else {}
    known = [*inspect.signature(Loop.fit).parameters][2:]  # but the loop itself and its loader
    if not isinstance(settings, dict):
        fix = 'return (loop, loader, {"epochs": 3, "validate": held_out})'
        raise BadArgument(f"the third that {made_by} returned is {an(type(settings).__name__)}", fix=fix)
    if strange := [str(name) for name in settings if name not in known]:
        fix = f"choose out of: {', '.join(known)}"
        raise BadArgument(f"{made_by} returned {printable(repr(strange[0]))}, which `Loop.fit` does not take", fix=fix)
    return Built(made[0], made[1], settings)


def file_and_function(target: str) -> tuple[str, str]:
    """The two parts of FILE.py:FUNCTION; raises where there is no such file, before anything runs."""
    file, colon, function = target.rpartition(":")
    if not colon:
        file = f"{target}.py" if Path(f"{target}.py").is_file() else target
        raise BadArgument(
            f"{printable(target)} names no function that builds the loop",
            fix=f"give FILE.py:FUNCTION, a function that returns (loop, loader), as in {printable(file)}:build",
        )
    if not Path(file).is_file():
        raise BadArgument(f"there is no file {printable(file)}", fix="give FILE.py:FUNCTION")
    return file, function


def _function(file: str, name: str) -> Callable[[], Any]:
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise BadArgument(f"{printable(file)} is not a Python file", fix="give FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    if (folder := str(path.parent.resolve())) not in sys.path:  # `bench` builds several times
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        functions = shorten([printable(each) for each in own if callable(getattr(module, each))])
        fix = f"name the one that builds, out of: {functions}" if functions else "write one that returns (loop, loader)"
        raise BadArgument(f"{printable(file)} has no function {printable(name)!r}", fix=fix)
    return function  # type: ignore[no-any-return]


@contextmanager
def _by_itself(file: str) -> Iterator[None]:
    """Without the arguments of this program, which a file may parse that is imported."""
    before, sys.argv = sys.argv, [file]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def explained(target: str) -> Iterator[None]:
    """Errors of a person's own code as one message, with the last line of theirs."""
    file = target.rpartition(":")[0]
    try:
        yield
    except HotloopError:
        raise
    except (Exception, SystemExit) as error:
        where, own = printable(file), Path(file).resolve()
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == own]
        if line := getattr(error, "lineno", None) or (lines[-1] if lines else None):
            where += f", line {line}"
        fix = "HOTLOOP_DEBUG=1 shows the whole traceback"
        if isinstance(error, SystemExit):
            fix = 'hotloop imports it without arguments: parse them and exit only under `if __name__ == "__main__"`'
        raise BadArgument(f"{where}: {type(error).__name__}: {printable(str(error))}", fix=fix) from error
