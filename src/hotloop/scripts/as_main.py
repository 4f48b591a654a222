"""A person's script, run as Python would run it, and ended from inside."""

import ast
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import open_code
from pathlib import Path
from types import ModuleType
from typing import Any


def interpreter(module: str) -> list[str]:
    """The command that runs a module of hotloop as a program; the current folder is not on its path, as with `-P`."""
    return [sys.executable, "-P", "-m", module]


class Enough(BaseException):
    """Ends a script from inside; not an `Exception`, so that only what catches everything catches it."""


def run_as_main(
    target: str, arguments: Sequence[str], *, module: bool = False, source: str | ast.Module | None = None
) -> None:
    """Run a file, or with `module` a module by its name, with the argv and the path that `python` would give it.

    `source`, text or parsed, is run in place of what the file holds.
    """
    sys.argv = [target, *arguments]
    if not sys.flags.safe_path:
        del sys.path[0]  # of the program that calls this
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, str(Path.cwd() if module else Path(target).resolve().parent))
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")  # not `runpy.run_path`, under which `__file__` and argv say the same
    main.__file__ = str(Path(target).absolute())
    sys.modules["__main__"] = main
    with open_code(main.__file__) as file:
        code = compile(file.read() if source is None else source, main.__file__, "exec")
    exec(code, main.__dict__)  # noqa: S102  # to run it is what is asked for


def shown_without(error: BaseException, *ours: str) -> traceback.TracebackException:
    """An error as Python shows it, without the frames of files that begin so, nor those that ran the script."""
    shown = traceback.TracebackException.from_exception(error)
    _hide(shown, (*ours, __file__, "<frozen runpy>", runpy.__file__ or "\0"))
    return shown


def _hide(shown: traceback.TracebackException, files: tuple[str, ...]) -> None:
    kept = [frame for frame in shown.stack if not frame.filename.startswith(files)]
    shown.stack = traceback.StackSummary.from_list(kept)
    for other in (shown.__cause__, shown.__context__):
        if other is not None:
            _hide(other, files)


@contextmanager
def quiet_threads() -> Iterator[None]:
    """A thread that is told to end does so in silence."""
    before = threading.excepthook

    def quiet(args: Any) -> None:
        if not issubclass(args.exc_type, Enough):
            before(args)

    threading.excepthook = quiet
    try:
        yield
    finally:
        threading.excepthook = before
