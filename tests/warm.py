"""Scripts in processes that have torch already: it is imported once, and each script gets a fork of that process.

A script's own process takes four seconds to import torch and what its optimizers need; a fork takes none. Tests of what
Python does before the first line of a script (imports, the search path) need a process of their own.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self, TextIO

TIMEOUT = 240  # seconds; generous: a busy machine is not a failure
HOTLOOP = ("-m", "hotloop")


@dataclass
class Running:
    """A process that was forked; `wait` gives its exit code, negative where a signal ended it."""

    warm: "Warm"
    pid: int

    def wait(self) -> int:
        return self.warm.ask({"wait": self.pid})


class Warm:
    """Runs scripts, each as `python SCRIPT ARGUMENTS` would."""

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # no more requests: it ends
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:  # processes that a test has left behind hold the other end of the pipe
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that has torch ended; what it printed says why"
        return int(answer)

    def start(
        self,
        *command: Path | str,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        out: Path | str = os.devnull,
        err: Path | str = os.devnull,
        terminal: str | None = None,
        own_session: bool = False,
    ) -> Running:
        """Begin `python COMMAND`: a script or `-m MODULE`, and its arguments.

        Its output goes to the files `out` and `err`, or to the pseudo-terminal that is called `terminal`, which it gets
        for its own, with its Ctrl-C. With `own_session`, a signal to its process group reaches no other process.
        What torch reads while it is imported, such as OMP_NUM_THREADS, cannot be set by `environment`.
        """
        request = {
            "command": [str(word) for word in command],
            "cwd": str(cwd),
            "environment": dict(os.environ if environment is None else environment),
            "files": [terminal] * 3 if terminal else [os.devnull, str(out), str(err)],
            "own_session": own_session or terminal is not None,  # whose first terminal becomes its own
        }
        return Running(self, self.ask(request))

    def run(
        self, *command: Path | str, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """The same up to its end, with what it printed."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            code = self.start(*command, cwd=cwd, environment=environment, out=out, err=err).wait()
            said = [file.read_text(encoding="utf-8", errors="replace") for file in (out, err)]
        return subprocess.CompletedProcess([str(word) for word in command], code, *said)


def serve() -> None:
    """Do what is asked for on stdin, a line each: begin a process and answer with its number, or wait for its end."""
    for name in ("torch._dynamo", "hotloop.cli"):  # the first is what optimizers import, slowly
        importlib.import_module(name)
    assert importlib.import_module("hotloop").Loop  # with all that it needs
    gc.collect()
    gc.freeze()  # or each fork would look through all of it at its end
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
            continue
        begun, begin = os.pipe()
        if not (child := os.fork()):
            become(request, begin)
        os.close(begin)
        os.read(begun, 1)  # its end: the files are open
        os.close(begun)
        print(child, flush=True)


def become(request: dict[str, Any], begin: int) -> NoReturn:
    """Run the script in this process, which ends with it as any other, by its error too."""
    signal.alarm(TIMEOUT)
    if request["own_session"]:
        os.setsid()
    for number, name in enumerate(request["files"]):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
    os.close(begin)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # to be asked of the environment again
    sys.stdin, sys.stdout, sys.stderr = map(open_as_python_does, ("r", "w", "w"), range(3))
    command = request["command"]
    try:
        if command[0] == "-m":
            sys.argv, sys.path[0] = command[1:], request["cwd"]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ended:
        if "HOTLOOP_TEST_RANDOM" in os.environ or not isinstance(ended.code, int | None):
            raise
        leave(ended.code or 0)
    if "HOTLOOP_TEST_RANDOM" not in os.environ:
        leave(0)
    sys.exit()


def leave(code: int) -> NoReturn:
    """End as Python does, but without the third of a second in which it takes all modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()  # temporary folders, children
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def open_as_python_does(mode: str, number: int) -> TextIO:
    """A standard stream, with the encoding and the buffer that the environment asks for."""
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")
    errors = "backslashreplace" if number == 2 else errors or "strict"
    stream = open(number, mode, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
    at_once = number == 2 or stream.isatty()
    stream.reconfigure(line_buffering=at_once, write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    return stream


if __name__ == "__main__":
    serve()
