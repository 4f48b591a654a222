"""`Turns`: runs of a script one after another, each in a process of its own that has torch from the start."""

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

from hotloop._torch import is_fork_without_cuda, load_compiler
from hotloop.apps.doctor.examined_script import ScriptRun
from hotloop.apps.doctor.examined_script import main as run_script
from hotloop.printing.text import duration, printable
from hotloop.scripts.children import KILL, Child
from hotloop.scripts.exchange import Exchange
from hotloop.scripts.forks import Forks, serve

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
        self._forks: Forks | None = None

    def __enter__(self) -> Self:
        if FORKS:
            environment = {"PYTHONUNBUFFERED": "1", **os.environ}
            start = partial(Child, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)
            self._forks = self._stack.enter_context(Forks("hotloop.apps.doctor.turns", start=start))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, request: ScriptRun) -> dict[str, Any]:
        """What a run of the script answered. Its `error` is in words, and the end of its output in `output`."""
        within = self._forks.folder if self._forks else None
        with tempfile.TemporaryDirectory(prefix="hotloop-", dir=within) as folder:
            exchange = Exchange(Path(folder))
            exchange.ask(request.to_json())
            ended = self._forks.run(exchange, limit=request.limit, grace=GRACE) if self._forks else None
            if ended is None or ended["code"] == WITHOUT_CUDA:  # now and from now on
                self._forks = None
                ended = {"code": _started(exchange, request.limit)}
            answer = exchange.answered or {"error": _ending(ended["code"], request.limit)}
            lines = (exchange.folder / "output").read_text(errors="replace").splitlines()[-SHOWN:]
            return {**answer, "output": [printable(line) for line in lines]}


def _ending(code: int | None, limit: float) -> str:
    if code is None or code == -KILL:
        return f"its process was killed; it had {duration(limit)}"
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"


def _started(exchange: Exchange, limit: float) -> int | None:
    """A process of its own from the beginning."""
    with (exchange.folder / "output").open("wb") as said:
        command = exchange.command("hotloop.apps.doctor.examined_script")
        with Child(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as child:
            return exchange.end(lambda: child.wait(PAUSE), limit=limit, grace=GRACE)


# In the process that forks


def _become(exchange: Exchange) -> NoReturn:
    """Run the script in this process, which ends as any other does: its clean-up runs."""
    if is_fork_without_cuda():
        os._exit(WITHOUT_CUDA)
    said = os.open(exchange.folder / "output", os.O_WRONLY | os.O_CREAT, 0o600)
    for stream, number in ((os.open(os.devnull, os.O_RDONLY), 0), (said, 1), (said, 2)):
        os.dup2(stream, number)
    sys.exit(run_script(exchange))


if __name__ == "__main__":
    load_compiler()
    serve(Path(sys.argv[1]), _become)
