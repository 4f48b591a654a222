"""What tests of loops share: a memory that ends, and steps at which something happens."""

import signal
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotloop import Loop
from hotloop.memory.storages import Following


class Memory(TorchDispatchMode):
    """A device whose memory ends: what operations make may take so many bytes at a time."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._following = Following(torch.device("cpu"), lambda key, size: None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._following.see(value)
        if self._following.live > self._capacity:
            raise torch.OutOfMemoryError(f"more than {self._capacity} bytes")
        return result


class Kept:
    """A log in memory."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, dict[str, float | None]]] = []
        self.closed = False

    def write(self, numbers: Mapping[str, float | None], *, step: int, time: float | None = None) -> None:
        self.entries.append((step, dict(numbers)))

    def close(self) -> None:
        self.closed = True

    def of(self, name: str) -> list[float | None]:
        return [numbers[name] for _, numbers in self.entries if name in numbers]


def at_step(loop: Loop, number: int, act: Callable[[], object], *, after: bool = False) -> None:
    """Do something just before, or after, the step with this number, counted from now."""
    plain, calls = loop.step, count(1)

    def step(batch: Any) -> Tensor:
        is_now = next(calls) == number
        if is_now and not after:
            act()
        loss = plain(batch)
        if is_now and after:
            act()
        return loss

    loop.step = step


def signalled(signum: int, times: int = 1) -> Callable[[], None]:
    """What sends this process a signal."""

    def send() -> None:
        for _ in range(times):
            signal.raise_signal(signum)

    return send


@pytest.fixture(autouse=True)
def _plans_are_for_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are compared to the bit stay plain, however slow the machine is; `tests/tune` tests the rest."""
    monkeypatch.setattr("hotloop.tune.course.WORTH_A_PLAN", 60.0)
    monkeypatch.setattr("hotloop.tune.course.WORTH_ON_CPU", 10**6)


@pytest.fixture(autouse=True)
def _no_commit_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is two processes of git for each run that saves; `test_journal.py` tests them."""
    monkeypatch.setattr("hotloop.run.run_files._git", lambda folder: None)


@pytest.fixture
def memory_of() -> Callable[[int], Memory]:
    """Inside `with memory_of(capacity):` more than so many bytes are out of memory."""
    return Memory
