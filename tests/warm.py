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
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, Self, TextIO

TIMEOUT = 240  # seconds; generous: a busy machine is not a failure
HOTLOOP = ("-m", "hotloop")
SERVER = "HOTLOOP_TEST_WARM"  # where to ask the process that forks, if several have one in common
WITH_CHILDREN = (
    "hotloop.scripts.children",
    "hotloop.apps.doctor.turns",
    "hotloop.apps.learn.checking",
)


def ask(server: str, request: dict[str, Any], streams: Sequence[int] = ()) -> int:
    """Ask the process that forks; it gets the open streams with the request."""
    with socket.socket(socket.AF_UNIX) as asked:
        connect(asked, server)
        socket.send_fds(asked, [json.dumps(request).encode() + b"\n"], list(streams))
        answer = asked.recv(100)
    assert answer, "the process that has torch ended; what it printed says why"
    return int(answer)


def connect(asked: socket.socket, server: str) -> None:
    """It may still be importing torch."""
    end = time.monotonic() + TIMEOUT
    while True:
        try:
            return asked.connect(server)
        except (FileNotFoundError, ConnectionRefusedError):
            assert time.monotonic() < end, "the process that has torch did not begin; what it printed says why"
            time.sleep(0.05)


@dataclass
class Running:
    """A process that was forked; `wait` gives its exit code, negative where a signal ended it."""

    server: str
    pid: int

    def wait(self) -> int:
        while not self.has_ended(TIMEOUT):
            pass
        return ask(self.server, {"wait": self.pid})

    def has_ended(self, timeout: float) -> bool:
        import psutil

        process, end, pause = psutil.Process(self.pid), time.monotonic() + timeout, 0.001
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return True


class Warm:
    """Runs scripts, each as `python SCRIPT ARGUMENTS` would, by a process of its own or by that of a server."""

    def __init__(self, server: str | None = None) -> None:
        self.server = server or ""
        self._is_own = server is None

    def __enter__(self) -> Self:
        if self._is_own:
            self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_own:
            self.close()

    def _begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-", ignore_cleanup_errors=True)
        self.server = str(Path(self._folder.name, "asked"))
        command = [sys.executable, __file__, self.server]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # no more requests: it ends
        self._process.wait(60)
        self._folder.cleanup()

    def start(
        self,
        *command: Path | str,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        out: Path | str = os.devnull,
        err: Path | str = os.devnull,
        terminal: str | None = None,
        own_session: bool = False,
        forks: bool = False,
    ) -> Running:
        """Begin `python COMMAND`: a script or `-m MODULE`, and its arguments.

        Its output goes to the files `out` and `err`, or to the pseudo-terminal that is called `terminal`, which it gets
        for its own, with its Ctrl-C. With `own_session`, a signal to its process group reaches no other process. With
        `forks`, the children of hotloop in it are forks too, though not its own.
        What torch reads while it is imported, such as OMP_NUM_THREADS, cannot be set by `environment`.
        """
        request = {
            "command": [str(word) for word in command],
            "cwd": str(cwd),
            "environment": dict(os.environ if environment is None else environment),
            "files": [terminal] * 3 if terminal else [os.devnull, str(out), str(err)],
            "own_session": own_session or terminal is not None,  # whose first terminal becomes its own
            "server": self.server if forks else None,
        }
        return Running(self.server, ask(self.server, request))

    def run(
        self, *command: Path | str, cwd: Path, environment: Mapping[str, str] | None = None, forks: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """The same up to its end, with what it printed."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            code = self.start(*command, cwd=cwd, environment=environment, out=out, err=err, forks=forks).wait()
            said = [file.read_text(encoding="utf-8", errors="replace") for file in (out, err)]
        return subprocess.CompletedProcess([str(word) for word in command], code, *said)


class ForkedChild:
    """`Child` of hotloop.scripts.children as a fork of a process that has torch."""

    server: str

    def __init__(
        self,
        command: Sequence[str],
        *,
        grace: float = 5.0,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: IO[Any] | int | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
    ) -> None:
        self._command, self._grace = list(command), grace
        self._cwd, self._environment = cwd or Path.cwd(), dict(os.environ if env is None else env)
        self._streams = (stdin, stdout, stderr)
        self._code: int | None = None

    def __enter__(self) -> Self:
        request = {
            "command": self._command[self._command.index("-m") :],
            "cwd": str(self._cwd),
            "environment": self._environment,
            "own_session": True,
        }
        with Path(os.devnull).open("r+b") as nothing:
            streams = [_number(each, usual, nothing.fileno()) for usual, each in enumerate(self._streams)]
            self._running = Running(self.server, ask(self.server, request, streams))
        self.pid = self._running.pid
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait(self, timeout: float | None = None) -> int | None:
        from hotloop.scripts.children import KILL, signal_group

        if self._code is None:
            if not self._running.has_ended(TIMEOUT if timeout is None else timeout):
                return None
            signal_group(self.pid, KILL)  # what it started and left behind
            self._code = self._running.wait()
        return self._code

    def interrupt(self) -> None:
        os.killpg(self.pid, signal.SIGINT)

    def end(self, *, grace: float | None = None) -> None:
        from hotloop.scripts.children import end_group

        if self._code is None:
            grace = self._grace if grace is None else grace
            end_group(self.pid, lambda seconds: self.wait(seconds) is not None, grace)
            self.wait()


def _number(stream: IO[Any] | int | None, usual: int, nothing: int) -> int:
    if stream is None:
        return usual
    if isinstance(stream, int):
        return nothing if stream == subprocess.DEVNULL else stream
    return stream.fileno()


def stand_in(folder: Path, server: str) -> str:
    """A file that can be called like `python SCRIPT ARGUMENTS`, for what starts processes by itself."""
    file = folder / "python"
    file.write_text(
        f"#!{sys.executable}\n"
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import warm\nsys.exit(warm.run_script({server!r}, sys.argv[1:]))\n"
    )
    file.chmod(0o755)
    return str(file)


def run_script(server: str, command: list[str]) -> int:
    """Have a script run with the streams, the folder and the environment of this process; SIGTERM is handed on."""
    request = {"command": command, "cwd": str(Path.cwd()), "environment": dict(os.environ), "own_session": False}
    running = Running(server, ask(server, request, (0, 1, 2)))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(running.pid, signal.SIGTERM))
    return running.wait()


# In the process that forks


def serve(server: str, *, for_ever: bool = False) -> None:
    """Do what is asked for on a socket: begin a process and answer with its number, or say how it ended."""
    # What optimizers import, slowly; with Matplotlib.
    for name in ("torch._dynamo", "hotloop.cli", "hotloop.apps.sprites.demo"):
        importlib.import_module(name)
    assert importlib.import_module("hotloop").Loop  # with all that it needs
    gc.collect()
    gc.freeze()  # or each fork would look through all of it at its end
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as selector:
        listening.bind(server)
        listening.listen(100)
        selector.register(listening, selectors.EVENT_READ)
        if not for_ever:
            selector.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        while not any(key.fileobj is sys.stdin for key, _ in selector.select()):  # its end
            asking, _ = listening.accept()
            with asking:
                request, streams = receive(asking)
                if "wait" in request:
                    told = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
                else:
                    told = begin(request, streams, (listening, asking))
                asking.sendall(str(told).encode())
                for stream in streams:
                    os.close(stream)


def receive(asking: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, and the streams that came with it."""
    said, streams, _, _ = socket.recv_fds(asking, 2**20, 10)
    while not said.endswith(b"\n"):
        said += asking.recv(2**20)
    return json.loads(said), streams


def begin(request: dict[str, Any], streams: list[int], ours: Sequence[socket.socket]) -> int:
    """Fork; the number of the process, whose files are open by then."""
    ready, begun = os.pipe()
    if not (child := os.fork()):
        for each in ours:
            each.close()
        if request["own_session"]:
            os.setsid()
        streams = streams or [os.open(name, os.O_RDWR | os.O_CREAT, 0o600) for name in request["files"]]
        become(request, streams, begun)
    os.close(begun)
    os.read(ready, 1)  # its end
    os.close(ready)
    return child


def become(request: dict[str, Any], streams: Sequence[int], begun: int) -> NoReturn:
    """Run the script in this process, which ends with it as any other, by its error too."""
    signal.alarm(TIMEOUT)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.close(begun)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # to be asked of the environment again
    sys.stdin, sys.stdout, sys.stderr = map(open_as_python_does, ("r", "w", "w"), range(3))
    if request.get("server"):
        fork_children_of_hotloop(request["server"])
    command = request["command"]
    try:
        if command[0] == "-m":
            sys.argv, sys.path[0] = command[1:], request["cwd"]
            asked = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
            sys.path[1:1] = [folder for folder in asked if folder and folder not in sys.path]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ended:
        if "HOTLOOP_TEST_RANDOM" in os.environ or not isinstance(ended.code, int | None):
            raise
        leave(ended.code or 0)
    except Exception:
        if "HOTLOOP_TEST_RANDOM" in os.environ:
            raise
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        leave(1)
    if "HOTLOOP_TEST_RANDOM" not in os.environ:
        leave(0)
    sys.exit()


def fork_children_of_hotloop(server: str) -> None:
    ForkedChild.server = server
    for name in WITH_CHILDREN:
        importlib.import_module(name).Child = ForkedChild  # type: ignore[attr-defined]


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
    serve(sys.argv[1])
