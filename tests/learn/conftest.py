"""What the tests of the lessons share: checks in processes that have torch already, and a data folder of their own."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotloop.apps.learn import checking

from ..warm import ForkedChild, Warm


@pytest.fixture(scope="session")
def warm_learn(warm: Warm) -> Iterator[str]:
    """The server of a process that has loaded what a check needs."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        server, out, err = (Path(folder, name) for name in ("asked", "out", "err"))
        script = Path(__file__).with_name("serve.py")
        running = warm.start(script, server, cwd=Path(folder), out=out, err=err)
        while "ready" not in out.read_text():
            assert not running.has_ended(0.05), err.read_text()
        yield str(server)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()


@pytest.fixture
def warm_checks(warm_learn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are checked in forks: importing torch for each would take minutes in all."""
    monkeypatch.setattr(ForkedChild, "server", warm_learn, raising=False)
    monkeypatch.setattr(checking, "Child", ForkedChild)


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Progress of a test is its own."""
    monkeypatch.setenv("HOTLOOP_DATA", str(tmp_path / "data"))
    return tmp_path / "data"
