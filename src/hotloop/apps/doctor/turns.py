"""`Turns`: runs of a script one after another, each in a process of its own that has torch from the start."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from hotloop._torch import is_fork_without_cuda, load_compiler
from hotloop.apps.doctor.examined_script import ScriptRun
from hotloop.apps.doctor.examined_script import main as run_script
from hotloop.printing.text import duration, printable
from hotloop.scripts.as_main import interpreter
from hotloop.scripts.children import KILL, Child, signal_group
from hotloop.scripts.exchange import Exchange

FORKS = hasattr(os, "fork") and sys.platform != "darwin"  # where a process that has torch may be forked
SHOWN = 30  # lines of a failed script's output
GRACE = 20.0  # seconds for a script to end once its steps are made
PAUSE = 0.02
WITHOUT_CUDA = 113  # exit code of a fork that could not use CUDA


class Turns:
    """Runs scripts. torch is imported once, by a process that forks for each of them.

    >>> with Turns() as turns:  # doctest: +SKIP
    ...     answer = turns.run(ScriptRun("train.py", (), False))
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._asked: int | None = None  # where the process that forks is asked
        self._told: IO[str] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotloop-")))
            if FORKS:
                self._begin(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, request: ScriptRun) -> dict[str, Any]:
        """What a run of the script answered. Its `error` is in words, and the end of its output in `output`."""
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            exchange = Exchange(Path(place))
            exchange.ask(request.to_json())
            code = self._forked(exchange)
            if code is None:
                code = _started(exchange)
            answer = exchange.answered or {"error": _ending(code, request.limit)}
            lines = (exchange.folder / "output").read_text(errors="replace").splitlines()[-SHOWN:]
            return {**answer, "output": [printable(line) for line in lines]}

    def _begin(self, stack: ExitStack) -> None:
        reading, asked = os.pipe()
        told, writing = os.pipe()
        self._asked = asked
        stack.callback(os.close, asked)
        self._told = stack.enter_context(os.fdopen(told))
        with os.fdopen(reading) as theirs, os.fdopen(writing, "w") as ours:
            command = interpreter("hotloop.apps.doctor.turns")
            stack.enter_context(Child(command, stdin=theirs, stdout=ours, env=_environment()))

    def _forked(self, exchange: Exchange) -> int | None:
        """How a fork ended; None where there can be none, now and from now on."""
        if self._asked is None or self._told is None:
            return None
        said = ""
        with suppress(BrokenPipeError):  # the process that forks is gone
            os.write(self._asked, f"{exchange.folder}\n".encode())
            said = self._told.readline()
        if not said or int(said) == WITHOUT_CUDA:
            self._asked = None
            return None
        return int(said)


def _ending(code: int, limit: float) -> str:
    if code == -KILL:
        return f"its process was killed; it had {duration(limit)}"
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"


def _environment() -> dict[str, str]:
    return {"PYTHONUNBUFFERED": "1", **os.environ}


def _started(exchange: Exchange) -> int:
    """A process of its own from the beginning."""
    with (exchange.folder / "output").open("wb") as said:
        command = exchange.command("hotloop.apps.doctor.examined_script")
        with Child(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as child:
            code = _end_of(exchange, lambda: child.wait(PAUSE))
            return -KILL if code is None else code


def _end_of(exchange: Exchange, wait: Callable[[], int | None]) -> int | None:
    return exchange.end(wait, limit=exchange.request["limit"], grace=GRACE)


# In the process that forks


def serve() -> None:
    """Fork for every folder that is named on stdin, and say how each process ended."""
    load_compiler()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, which ends this one
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        exchange = Exchange(Path(line.rstrip("\n")))
        child = os.fork()
        if not child:
            answers.close()
            _become(exchange)
        signal.signal(signal.SIGTERM, partial(_leave, child))
        code = _end_of(exchange, partial(_ended, child))
        signal_group(child, KILL)  # also what it started and left behind
        if code is None:
            os.waitpid(child, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print(-KILL if code is None else code, file=answers)


def _ended(child: int) -> int | None:
    """The exit code, or None after a moment."""
    which, status = os.waitpid(child, os.WNOHANG)
    if which:
        return os.waitstatus_to_exitcode(status)
    time.sleep(PAUSE)
    return None


def _leave(child: int, *_: object) -> None:
    signal_group(child, KILL)
    os._exit(128 + signal.SIGTERM)


def _become(exchange: Exchange) -> NoReturn:
    """Run the script in this process, which ends as any other does: its clean-up runs."""
    os.setsid()
    if is_fork_without_cuda():
        os._exit(WITHOUT_CUDA)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    said = os.open(exchange.folder / "output", os.O_WRONLY | os.O_CREAT, 0o600)
    for stream, number in ((os.open(os.devnull, os.O_RDONLY), 0), (said, 1), (said, 2)):
        os.dup2(stream, number)
    sys.exit(run_script(exchange))


if __name__ == "__main__":
    serve()
