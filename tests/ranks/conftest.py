"""Runs of a script on several ranks: processes with the environment that torchrun gives them."""

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from ..warm import Running, Warm

PATIENCE = 120  # seconds


@dataclass
class Ended:
    """How a rank has ended, and what it printed."""

    code: int
    out: str
    err: str


class Launch:
    """The ranks of one run; `each(rank)` gives further variables."""

    def __init__(
        self,
        warm: Warm,
        *command: Path | str,
        cwd: Path,
        ranks: int = 2,
        each: Callable[[int], dict[str, str]] = lambda rank: {},
    ) -> None:
        self.folder = cwd
        port = free_port()
        self.ranks: list[Running] = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "HOTLOOP_DEVICE": "cpu",
                "HOTLOOP_RANK_TIMEOUT": "60",
                **each(rank),
            }
            files = {"out": cwd / f"out {rank}", "err": cwd / f"err {rank}"}
            for file in files.values():
                file.unlink(missing_ok=True)
            self.ranks.append(warm.start(*command, cwd=cwd, environment=environment, **files))

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.ranks[rank].pid, number)

    def wait(self) -> list[Ended]:
        """Wait for all ranks."""
        ended = []
        for rank, running in enumerate(self.ranks):
            code = running.wait()
            out, err = ((self.folder / f"{name} {rank}").read_text(encoding="utf-8") for name in ("out", "err"))
            ended.append(Ended(code, out, err))
        return ended


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


Launcher = Callable[..., Launch]


@pytest.fixture
def launch(warm: Warm, tmp_path: Path) -> Launcher:
    """`launch(script, *arguments, ranks=2)` begins the ranks."""
    return partial(Launch, warm, cwd=tmp_path)
