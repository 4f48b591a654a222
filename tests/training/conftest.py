"""What tests of loops share: a memory that ends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


@pytest.fixture(autouse=True)
def _plans_are_for_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are compared to the bit stay plain, however slow the machine is; `tests/tune` tests the rest."""
    monkeypatch.setattr("hotloop.tune.tuner.WORTH_A_PLAN", 60.0)
    monkeypatch.setattr("hotloop.tune.tuner.WORTH_ON_CPU", 10**6)


@pytest.fixture(autouse=True)
def _no_commit_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is two processes of git for each run that saves; `test_journal.py` tests them."""
    monkeypatch.setattr("hotloop.training.run_files._git", lambda folder: None)


@pytest.fixture
def memory_of() -> Callable[[int], Memory]:
    """Inside `with memory_of(capacity):` more than so many bytes are out of memory."""
    return Memory
