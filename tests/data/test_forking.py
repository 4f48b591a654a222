"""What workers are born with is not theirs to free."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hotloop.data import stream
from hotloop.data.loader_workers import forking


class Cycle:
    def __init__(self) -> None:
        self.me = self


class Collecting(Dataset[Any]):
    """Items that tell whether the garbage of the parent was collected where they are made."""

    def __init__(self, garbage: "weakref.ref[Cycle]") -> None:
        self.garbage = garbage

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            gc.collect()
        return torch.tensor(self.garbage() is not None)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Garbage stays until it is asked for, and nothing is frozen."""
    gc.unfreeze()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


@pytest.fixture
def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_leave_the_garbage_of_their_parent_alone(persistent: bool, with_a_gpu: None) -> None:
    garbage = Cycle()
    data = Collecting(weakref.ref(garbage))
    del garbage
    assert data.garbage() is not None
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent, "multiprocessing_context": "fork"}
    for _ in range(2):
        for batch in stream(DataLoader(data, 2, **options), "cpu"):
            assert batch.all()
    assert data.garbage() is not None
    gc.collect()
    assert data.garbage() is None, "the parent still collects"


def test_without_a_gpu_nothing_is_frozen() -> None:
    with forking():
        assert gc.get_freeze_count() == 0


def test_what_a_person_has_frozen_stays_frozen(with_a_gpu: None) -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    try:
        with forking():
            pass
        assert gc.get_freeze_count() > 0.99 * before  # some of it was in use for a moment
    finally:
        gc.unfreeze()


def test_an_error_unfreezes(with_a_gpu: None) -> None:
    with pytest.raises(ValueError, match="mine"), forking():
        raise ValueError("mine")
    assert gc.get_freeze_count() == 0
