"""What the tests of the lessons share: checks in processes that have torch already, and a data folder of their own."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from hotloop.children import end_group, signal_group
from hotloop.learn import checking, steps

from ..warm import Running, Warm


class WarmLearn(Warm):
    """Its process has loaded what a check needs."""

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, str(Path(__file__).with_name("serve.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._one_at_a_time = threading.Lock()
        return self

    def ask(self, request: dict[str, Any]) -> int:
        with self._one_at_a_time:  # a page checks and runs at one time
            return super().ask(request)


class WarmChild:
    """`Child` of hotloop.children in a fork of a process that has torch."""

    server: WarmLearn

    def __init__(self, command: list[str], *, grace: float, cwd: Path, **streams: Any) -> None:
        self._command, self._grace, self._cwd = command, grace, cwd
        self._files = [_name(streams[each]) for each in ("stdin", "stdout", "stderr")]
        self._code: int | None = None

    def __enter__(self) -> Self:
        module = self._command.index("-m")
        request = {
            "command": self._command[module:],
            "cwd": str(self._cwd),
            "environment": dict(os.environ),
            "files": self._files,
            "own_session": True,
        }
        self._running = Running(self.server, self.server.ask(request))
        self.pid = self._running.pid
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            end_group(self.pid, lambda seconds: self.wait(seconds) is not None, self._grace)
        if self._code is None:
            self._code = self._running.wait()

    def wait(self, timeout: float) -> int | None:
        end = time.monotonic() + timeout
        while psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() >= end:
                return None
            time.sleep(0.005)
        self._code = self._running.wait()
        signal_group(self.pid, checking.signal.SIGKILL)
        return self._code


def _name(stream: Any) -> str:
    """What another process opens to have the same stream: a file, nothing, or an end of a pipe of ours."""
    if stream == subprocess.DEVNULL:
        return os.devnull
    return f"/proc/{os.getpid()}/fd/{stream}" if isinstance(stream, int) else str(stream.name)


@pytest.fixture(scope="session")
def warm_learn() -> Iterator[WarmLearn]:
    with WarmLearn() as running:
        yield running


@pytest.fixture
def warm_checks(warm_learn: WarmLearn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are checked and steps run in forks: importing torch for each would take minutes in all."""
    monkeypatch.setattr(WarmChild, "server", warm_learn, raising=False)
    monkeypatch.setattr(checking, "Child", WarmChild)
    monkeypatch.setattr(steps, "Child", WarmChild)


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Progress of a test is its own."""
    monkeypatch.setenv("HOTLOOP_DATA", str(tmp_path / "data"))
    return tmp_path / "data"
