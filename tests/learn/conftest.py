"""What the tests of the lessons share: checks in processes that have torch already, and a data folder of their own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from hotloop.children import end_group, signal_group
from hotloop.learn import checking

from ..warm import Warm


class WarmLearn(Warm):
    """Its process has loaded what a check needs."""

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, str(Path(__file__).with_name("serve.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self


class WarmChild:
    """`Child` of hotloop.children in a fork of a process that has torch."""

    server: WarmLearn

    def __init__(self, command: list[str], *, grace: float, cwd: Path, stderr: Any, **_: Any) -> None:
        self._command, self._grace, self._cwd, self._err = command, grace, cwd, Path(stderr.name)
        self._code: int | None = None

    def __enter__(self) -> Self:
        module = self._command.index("-m")
        self._running = self.server.start(*self._command[module:], cwd=self._cwd, err=self._err, own_session=True)
        self.pid = self._running.pid
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            end_group(self.pid, lambda seconds: self.wait(seconds) is not None, self._grace)
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


@pytest.fixture(scope="session")
def warm_learn() -> Iterator[WarmLearn]:
    with WarmLearn() as running:
        yield running


@pytest.fixture
def warm_checks(warm_learn: WarmLearn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are checked in forks: importing torch for each would take minutes in all."""
    monkeypatch.setattr(WarmChild, "server", warm_learn, raising=False)
    monkeypatch.setattr(checking, "Child", WarmChild)


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Progress of a test is its own."""
    monkeypatch.setenv("HOTLOOP_DATA", str(tmp_path / "data"))
    return tmp_path / "data"
