"""`workers_for`: a number that keeps up, within cores and memory, with its reasons."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hotloop.data import WorkersAdvice, workers_for
from hotloop.data.worker_count import LoadingLimits

from .test_position import Flowing

DATA = TensorDataset(torch.zeros(64))
MACHINE = LoadingLimits(cores=16, room=2 << 30)


def loader_with(workers: int, **options: Any) -> DataLoader[Any]:
    loader = DataLoader(DATA, 4, **options)
    loader.num_workers = workers  # past the warning about the cores of this machine
    loader.prefetch_factor = 2 if workers else None
    return loader


def advice(workers: int = 4, loader: object = None, **measured: Any) -> WorkersAdvice:
    options: dict[str, Any] = {"batch_seconds": 0.080, "waited": 0.6, "step_seconds": 0.032, "limits": MACHINE}
    return workers_for(loader_with(workers) if loader is None else loader, **(options | measured))


def test_as_many_as_keep_up_with_a_quarter_to_spare() -> None:
    """Four make a batch in 80 ms, so one takes 320 ms; 12.5 make 1.25 batches in the 32 ms of a step."""
    told = advice()
    assert (told.number, told.prefetch_factor) == (13, 2)
    assert told.why == (
        "the loop waits 60% of its time for the loader: 4 workers take 80 ms for a batch, a step 32 ms; "
        "13 workers keep up"
    )


def test_a_loader_that_keeps_up_is_left_alone() -> None:
    assert advice(waited=0.02).number == 4
    assert "keeps up" in advice(waited=0.02).why


def test_a_loader_that_is_slow_now_and_then_is_left_alone() -> None:
    told = advice(waited=0.06, batch_seconds=0.032, step_seconds=0.130)
    assert told.number == 4
    assert "some batches take longer" in told.why


def test_not_more_than_the_cores_but_one() -> None:
    told = advice(step_seconds=0.010)
    assert told.number == 16
    assert "40 workers would keep up, 16 is the most: this process may use 16 cores" in told.why
    told = advice(limits=LoadingLimits(cores=4, room=1 << 30))
    assert told.number == 4
    assert "13 workers would keep up, 4 stay: this process may use 4 cores" in told.why
    assert advice(limits=LoadingLimits(cores=1, room=1 << 30), workers=1).number == 1
    assert advice(workers=20, step_seconds=1e-9).number == 20, "what a person has chosen is never less"


def test_the_number_of_now_counts() -> None:
    """A stream may have changed it since."""
    assert (
        workers_for(
            loader_with(2), workers=8, batch_seconds=0.04, waited=0.5, step_seconds=0.032, limits=MACHINE
        ).number
        == 13
    )


def test_batches_under_way_fit_into_memory() -> None:
    told = advice(batch_bytes=100 << 20)
    assert (told.number, told.prefetch_factor) == (13, 1), "fewer in advance come before fewer workers"
    told = advice(batch_bytes=400 << 20)
    assert (told.number, told.prefetch_factor) == (5, 1)
    assert "a batch takes 400.0 MiB" in told.why
    assert advice(batch_bytes=4 << 30).number == 4


FIXED: dict[str, tuple[Any, int, str]] = {
    "no workers": (loader_with(0), 0, "with num_workers=2, a batch would take 32 ms instead of 80 ms"),
    "iterable": (DataLoader(Flowing(), 2, num_workers=1), 1, "IterableDataset"),
    "iterable, no workers": (DataLoader(Flowing(), 2), 0, "IterableDataset"),
    "a list": ([torch.ones(2)], 0, "a list has no workers"),
}


@pytest.mark.parametrize(("loader", "number", "why"), FIXED.values(), ids=FIXED)
def test_what_cannot_change_says_why(loader: Any, number: int, why: str) -> None:
    told = advice(loader=loader)
    assert told.number == number
    assert why in told.why


def test_the_limits_of_this_machine(tmp_path: Path) -> None:
    here = LoadingLimits.here()
    assert here.cores >= 1
    assert 0 < here.room <= 2 << 30
    files = {"cpu.max": "100000 100000", "memory.max": str(5 << 30)}
    for name, text in files.items():
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / name).write_text(text)
    (tmp_path / "dev/shm").mkdir(parents=True)
    limited = LoadingLimits.here(tmp_path)
    assert limited.cores == 1
    assert limited.room <= (5 << 30) // 10


@pytest.mark.parametrize("share", [0.06, 0.5, 0.95])
@pytest.mark.parametrize("batch_bytes", [0, 1 << 20, 1 << 29])
def test_whatever_is_measured_the_machine_is_not_overloaded(share: float, batch_bytes: int) -> None:
    for workers in (1, 3, 15):
        for step in (0.0, 0.001, 0.5):
            told = advice(workers, waited=share, step_seconds=step, batch_bytes=batch_bytes)
            assert workers <= told.number <= max(workers, 16)
            if told.number > workers:
                assert told.number * told.prefetch_factor * batch_bytes <= MACHINE.room


@pytest.mark.parametrize("workers", [0, 4])
def test_a_loader_that_is_not_at_hand_has_as_many_workers_as_are_told(workers: int) -> None:
    """A profile and the doctor have seen other people's loaders; there is one formula for all."""
    told = workers_for(None, workers=workers, batch_seconds=0.080, waited=0.6, step_seconds=0.032, limits=MACHINE)
    assert told.number == (13 if workers else 2)
    assert ("4 workers take 80 ms" if workers else "this process takes 80 ms") in told.why
