"""A process that has imported what runs of scripts need, and forks for each of them."""

import json
import math
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

from hotloop.records.files import write_json
from hotloop.scripts.as_main import interpreter
from hotloop.scripts.children import Child, end_group, unwound_by_signals
from hotloop.scripts.exchange import Exchange

PAUSE = 0.02
FORK_GRACE = 1.0  # seconds from SIGTERM to SIGKILL, for a script and all it started
SERVER_GRACE = 5.0  # seconds for the process that forks to end its script and itself
REQUESTS, ENDED = "requests", "ended.json"  # a named pipe; how a run ended, beside its answer


class Forks:
    """Runs requests in forks of one process: that of a module which calls `serve` once it has imported all.

    >>> with Forks("hotloop.apps.doctor.turns", start=Child) as forks:  # doctest: +SKIP
    ...     code = forks.run(exchange)
    """

    def __init__(self, module: str, *arguments: str, start: Callable[[Sequence[str]], Child]) -> None:
        self._command, self._start = [*interpreter(module), *arguments], start
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # left at once if something fails on the way
            self._exchange = Exchange(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotloop-"))))
            os.mkfifo(self._exchange.folder / REQUESTS)
            self._requests = os.open(self._exchange.folder / REQUESTS, os.O_RDWR)  # waits for no reader
            requests = stack.enter_context(ExitStack())
            requests.callback(os.close, self._requests)
            self._child = stack.enter_context(self._start([*self._command, str(self._exchange.folder)]))
            stack.callback(self._child.wait, SERVER_GRACE)
            stack.callback(requests.close)  # it ends the script that it runs, and itself
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def folder(self) -> Path:
        """For the folders of runs: it goes when all processes have ended, so that none makes it again."""
        return self._exchange.folder

    def begun(self) -> dict[str, Any] | None:
        """What the process says once it is ready, or cannot be; None where it ended without a word."""
        self._until(lambda: self._exchange.answered is not None)
        return self._exchange.answered

    def run(self, exchange: Exchange, *, limit: float = math.inf, grace: float = math.inf) -> dict[str, Any] | None:
        """The `code` of the process, None where it had to be ended; None where the process that forks is gone."""
        ended = exchange.folder / ENDED
        asked = {"folder": str(exchange.folder), "limit": limit, "grace": grace}
        os.write(self._requests, f"{json.dumps(asked)}\n".encode())
        self._until(ended.exists)
        return json.loads(ended.read_text()) if ended.exists() else None

    def _until(self, happened: Callable[[], bool]) -> None:
        while not happened() and self._child.wait(PAUSE) is None:
            pass


def serve(folder: Path, become: Callable[[Exchange], NoReturn]) -> None:
    """Fork for each request of `Forks`, until there are no more; `become` runs in the fork, to its end."""
    Exchange(folder).answer({})
    with unwound_by_signals(), (folder / REQUESTS).open(encoding="utf-8") as lines:
        for line in iter(lines.readline, ""):
            asked = json.loads(line)
            exchange = Exchange(Path(asked["folder"]))
            pid = os.fork()
            if not pid:
                os.setpgid(0, 0)  # so that it ends with all it starts, and this process goes on
                for ending in (signal.SIGTERM, signal.SIGHUP):
                    signal.signal(ending, signal.SIG_DFL)
                become(exchange)
            code = _Fork(pid, lines.fileno()).end(exchange, asked["limit"], asked["grace"])
            write_json(exchange.folder / ENDED, {"code": code})


class _Fork:
    """The process of a script."""

    def __init__(self, pid: int, requests: int) -> None:
        self._pid, self._requests = pid, requests
        self._code: int | None = None
        with suppress(OSError):  # whichever of the two comes first
            os.setpgid(pid, pid)

    def end(self, exchange: Exchange, limit: float, grace: float) -> int | None:
        """Wait for its end; the exit code, None where it had to be ended."""
        try:
            return exchange.end(partial(self._moment, asked_no_more=True), limit=limit, grace=grace)
        except BrokenPipeError:
            return None
        finally:
            end_group(self._pid, self._ends_within, FORK_GRACE)
            self._ends_within(math.inf)

    def _moment(self, *, asked_no_more: bool = False) -> int | None:
        """The exit code, or None after a moment. A pipe that can be read now has come to its end."""
        if self._code is None:
            done, status = os.waitpid(self._pid, os.WNOHANG)
            if done:
                self._code = os.waitstatus_to_exitcode(status)
            elif select.select([self._requests] if asked_no_more else [], [], [], PAUSE)[0]:
                raise BrokenPipeError
        return self._code

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._moment() is None:
            if time.monotonic() >= deadline:
                return False
        return True
