"""A loader is reopened with other workers inside an epoch: no batch is lost, doubled, early or late."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from hotloop.data import Stream
from hotloop.errors import BadArgument

from ..thorough import tries
from .test_position import AtOnce, Flowing

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # PyTorch counts the cores
ITEMS = 23


class Items(Dataset[Tensor]):
    """An item has its number, a random number, and the process that made it."""

    offset = 0.0

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([i, torch.rand(()).item() + self.offset, os.getpid()], dtype=torch.float64)


def loader_of(how: dict[str, Any], workers: int) -> DataLoader[Any]:
    options = {key: value for key, value in how.items() if key != "own"}
    generator = torch.Generator().manual_seed(6) if how.get("own") else None
    return DataLoader(Items(), 2, shuffle=True, generator=generator, num_workers=workers, **options)


def states(loader: DataLoader[Any]) -> list[Any]:
    own = None if loader.generator is None else loader.generator.get_state().tolist()
    return [torch.get_rng_state().tolist(), own]


def plain(how: dict[str, Any], workers: int, epochs: int) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(4)
    loader = loader_of(how, workers)
    return [[batch[:, 0].tolist() for batch in loader] for _ in range(epochs)], states(loader)


@settings(deadline=None, max_examples=tries(1, 20))
@example(how={"own": False, "persistent_workers": True, "prefetch_factor": 1}, workers=1, changes=[(3, 2), (3, 1)])
@example(how={"own": True, "persistent_workers": False, "prefetch_factor": 2}, workers=2, changes=[(4, 1), (5, 3)])
@given(
    how=st.fixed_dictionaries(
        {"own": st.booleans(), "persistent_workers": st.booleans(), "prefetch_factor": st.integers(1, 3)}
    ),
    workers=st.integers(1, 3),
    changes=st.lists(st.tuples(st.integers(1, 11), st.integers(1, 3)), min_size=1, max_size=3),
)
def test_the_order_is_that_of_the_loader(how: dict[str, Any], workers: int, changes: list[tuple[int, int]]) -> None:
    """Changes after 1 to 11 of the twelve batches of the first epoch."""
    expected, after = plain(how, workers, 2)
    torch.manual_seed(4)
    loader = loader_of(how, workers)
    batches: Stream[Tensor] = Stream(loader, "cpu")

    def change(done: int) -> None:
        for at, number in changes:
            if at == done:
                assert batches.change_workers(number) == batches.workers == number

    seen: list[Any] = [[]]
    for done, batch in enumerate(batches, 1):
        seen[0].append(batch[:, 0].tolist())
        assert batches.origin.indices == tuple(int(i) for i in seen[0][-1])
        change(done)
    rows = list(batches)
    seen.append([batch[:, 0].tolist() for batch in rows])
    assert seen == expected
    assert states(loader) == after
    made_by = {pid for batch in rows for pid in batch[:, 2].tolist()}
    assert len(made_by) == batches.workers


def test_from_the_next_epoch_on_it_is_the_loader_with_that_number() -> None:
    """What is random in items included."""
    torch.manual_seed(4)
    list(batches := loader_of({}, 1))
    expected = [batch[:, :2] for batch in DataLoader(Items(), 2, sampler=batches.sampler, num_workers=2)]
    torch.manual_seed(4)
    ours = Stream(loader_of({}, 1), "cpu")
    for number, _ in enumerate(ours):
        if number == 3:
            ours.change_workers(2)
    assert all(torch.equal(batch[:, :2], other) for batch, other in zip(ours, expected, strict=True))


def test_a_change_is_the_same_in_each_repetition() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(4)
        batches = Stream(loader_of({}, 1), "cpu")
        rows = []
        for number, batch in enumerate(batches):
            rows.append(batch[:, :2])
            if number == 3:
                batches.change_workers(2)
        runs.append(torch.cat(rows))
    assert torch.equal(*runs)
    assert runs[0][:, 1].unique().numel() == ITEMS, "no random number comes twice"


def test_what_was_under_way_is_loaded_again_by_the_new_workers() -> None:
    batches = Stream(loader_of({"prefetch_factor": 2}, 1), "cpu")
    made_by = []
    for number, batch in enumerate(batches):
        made_by.append(batch[0, 2].item())
        if number == 2:
            batches.change_workers(2)
    assert len(set(made_by[:3])) == 1
    assert len(set(made_by[3:])) == 2
    assert not set(made_by[:3]) & set(made_by[3:])


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_stay_where_the_dataset_was_changed_inside_an_epoch(persistent: bool) -> None:
    """The rest of the epoch is what the dataset was when it began, as with the loader itself."""
    loader = loader_of({"persistent_workers": persistent}, 1)
    batches = Stream(loader, "cpu")
    rows = []
    for number, batch in enumerate(batches):
        rows.append(batch)
        if number == 2:
            loader.dataset.offset = 10.0
            with pytest.raises(BadArgument, match="changed after its workers were started"):
                batches.change_workers(2)
    assert torch.cat(rows)[:, 1].max() < 10


def test_a_position_says_that_random_items_are_not_the_same_and_keeps_the_order() -> None:
    expected, _ = plain({}, 1, 1)
    torch.manual_seed(4)
    batches = Stream(loader_of({}, 1), "cpu")
    for number, _ in enumerate(batches, 1):
        if number == 2:
            batches.change_workers(2)
        if number == 6:
            break
    position, state = batches.position(6), torch.get_rng_state()
    assert position.workers == 2
    assert "changed during the epoch" in (position.reason or "")
    again = Stream(loader_of({}, 3), "cpu")
    resumption = again.resume(position)
    assert (resumption.skipped, resumption.loaded) == (6, 0), "nothing is loaded for items that are other ones anyway"
    assert "has 3 now" in (resumption.reason or "")
    torch.set_rng_state(state)
    assert [batch[:, 0].tolist() for batch in again] == expected[0][6:]
    assert again.position(None).reason is None


def test_without_processes_to_be_had_the_present_ones_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = plain({}, 1, 1)
    torch.manual_seed(4)
    batches = Stream(loader_of({}, 1), "cpu")
    seen = []
    for number, batch in enumerate(batches):
        seen.append(batch[:, 0].tolist())
        if number == 2:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fork", lambda: (_ for _ in ()).throw(BlockingIOError(11, "no processes left")))
                assert batches.change_workers(2) == 1
    assert seen == expected[0]


class OwnLoader(DataLoader[Any]):
    pass


FIXED: dict[str, tuple[Callable[[], Any], str]] = {
    "no workers": (partial(DataLoader, Items(), 2), "has no workers"),
    "iterable": (lambda: DataLoader(Flowing(), 2, num_workers=1), "IterableDataset"),
    "own class": (lambda: OwnLoader(Items(), 2, num_workers=1), "is a subclass of DataLoader"),
    "own sampler": (lambda: DataLoader(Items(), 2, sampler=AtOnce(), num_workers=1), "sampler of its own"),
    "context": (lambda: DataLoader(Items(), 2, num_workers=1, multiprocessing_context="fork"), "context"),
    "out of order": (lambda: DataLoader(Items(), 2, num_workers=1, in_order=False), "in_order=False"),
    "on the device": (lambda: DataLoader(TensorDataset(torch.ones(4)), 2, num_workers=1), "lives on the device"),
    "a list": (lambda: [torch.ones(2)], "a list has no workers"),
}


@pytest.mark.parametrize(("build", "why"), FIXED.values(), ids=FIXED)
def test_where_the_number_cannot_change_it_says_why(build: Callable[[], Any], why: str) -> None:
    batches = Stream(build(), "cpu")
    next(iter(batches))
    assert why in (batches.why_workers_stay or "")
    with pytest.raises(BadArgument, match="number of workers cannot change"):
        batches.change_workers(2)


def test_a_number_below_one_and_a_change_between_epochs_are_refused() -> None:
    batches = Stream(loader_of({}, 1), "cpu")
    for number, _ in enumerate(batches):
        if number == 1:
            with pytest.raises(BadArgument, match="number=0"):
                batches.change_workers(0)
    with pytest.raises(BadArgument, match="no epoch is in progress"):
        batches.change_workers(2)


def test_workers_of_a_plan_change_too() -> None:
    batches = Stream(DataLoader(Items(), 2, sampler=RandomSampler(Items())), "cpu", workers=1)
    iterator = iter(batches)
    next(iterator)
    assert batches.change_workers(2, prefetch_factor=1) == 2
    assert batches.asked == ("auto", False, 2)
    assert len(list(iterator)) == 11


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["direct", "prefetched"])
def test_pinned_batches_on_cuda(kind: Any) -> None:
    torch.manual_seed(4)
    expected = [[batch[:, 0].tolist() for batch in DataLoader(Items(), 2, shuffle=True, num_workers=2)]]
    torch.manual_seed(4)
    batches: Stream[Tensor] = Stream(DataLoader(Items(), 2, shuffle=True, num_workers=2), "cuda", kind, pinned=True)
    for _ in range(2):
        seen = []
        for number, batch in enumerate(batches):
            assert batch.is_cuda
            seen.append(batch[:, 0].tolist())
            if number in (2, 5):
                batches.change_workers(6 - number)
        expected.append(seen)
    assert expected[1] == expected[0]
    assert sorted(i for batch in expected[2] for i in batch) == [float(i) for i in range(ITEMS)]
