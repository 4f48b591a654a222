"""The order drawn at once is the order of the DataLoader, and it uses random numbers as the DataLoader does."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hotloop.data import order
from hotloop.data.order import can_draw_at_once, draws_at_once

from ..thorough import tries


def rows(items: int) -> TensorDataset:
    return TensorDataset(torch.arange(items))


def seen_in(batches: Iterable[Any], generators: list[torch.Generator], stop: int | None, dice: bool) -> list[Any]:
    """The batches up to a break, and the rng states after each of them and at the end."""
    seen: list[Any] = []

    def look(batch: Any) -> None:
        states = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
        seen.append((batch, [hash(state.numpy().tobytes()) for state in states]))

    for number, batch in enumerate(batches):
        look(torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist())
        if number == stop:
            break
        if dice:
            torch.rand(1)  # as dropout between two batches
    look(None)
    return seen


@settings(deadline=None, max_examples=tries(50, 150))
@given(
    items=st.integers(1, 40),
    size=st.integers(1, 45),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**32),
    generators=st.sampled_from(["none", "one", "one each"]),
    stops=st.lists(st.none() | st.integers(0, 5), min_size=1, max_size=3),
    dice=st.booleans(),
)
def test_exactly_the_batches_of_the_loader(
    items: int, size: int, drop_last: bool, seed: int, generators: str, stops: list[int | None], dice: bool
) -> None:
    """Several epochs, each to its end or to a break; the rng states are the same after every single batch."""
    seen = []
    for ours in (False, True):
        torch.manual_seed(seed)
        mine = [torch.Generator().manual_seed(seed + i) for i in range(2)]
        data = rows(items)
        if generators == "one each":
            sampler = RandomSampler(data, generator=mine[1])
            loader = DataLoader(data, size, sampler=sampler, drop_last=drop_last, generator=mine[0])
        else:
            shared = mine[0] if generators == "one" else None
            loader = DataLoader(data, size, shuffle=True, drop_last=drop_last, generator=shared)
        assert can_draw_at_once(loader)
        epochs = (draws_at_once(loader, seeds_workers=True) if ours else loader for _ in stops)
        seen.append([seen_in(epoch, mine, stop, dice) for epoch, stop in zip(epochs, stops, strict=True)])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("seeded", [False, True])
def test_workers_that_persist_are_seeded_once(seeded: bool) -> None:
    """In a later epoch such a loader draws no seed for them, so only the sampler draws."""
    seen = []
    for ours in (False, True):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4) if seeded else None
        loader = DataLoader(rows(13), 4, shuffle=True, generator=generator)
        assert loader.batch_sampler is not None
        batches = draws_at_once(loader, seeds_workers=False) if ours else loader.batch_sampler
        seen.append([torch.as_tensor(batch).tolist() for batch in batches] + [torch.get_rng_state().tolist()])
    assert seen[0] == seen[1]


def test_a_dataset_that_grows_is_seen_in_the_next_epoch() -> None:
    data = rows(3)
    loader = DataLoader(data, 2, shuffle=True)
    assert sorted(torch.cat(list(draws_at_once(loader, seeds_workers=True))).tolist()) == [0, 1, 2]
    data.tensors = (torch.arange(5),)
    assert sorted(torch.cat(list(draws_at_once(loader, seeds_workers=True))).tolist()) == [0, 1, 2, 3, 4]


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(7.0)


class Backwards(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source) - 1, -1, -1))


class Doubled(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return (batch * 2 for batch in super().__iter__())


DATA = rows(23)
REFUSED: dict[str, DataLoader[Any]] = {
    "with replacement": DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)),
    "fewer than all": DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=22)),
    "more than all": DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=46)),
    "in order": DataLoader(DATA, 4),
    "in order, by name": DataLoader(DATA, 4, sampler=SequentialSampler(DATA)),
    "a subset": DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(23))),
    "weighted": DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 23, 23)),
    "a list of indices": DataLoader(DATA, 4, sampler=list(range(23))),
    "a sampler of one's own": DataLoader(DATA, 4, sampler=Backwards(DATA)),
    "batches of one's own": DataLoader(DATA, batch_sampler=Doubled(RandomSampler(DATA), 4, False)),
    "one by one": DataLoader(DATA, batch_size=None, shuffle=True),
    "iterable": DataLoader(Endless(), 4),
}


@pytest.mark.parametrize("loader", REFUSED.values(), ids=REFUSED)
def test_loaders_that_draw_otherwise_are_refused(loader: DataLoader[Any]) -> None:
    assert not can_draw_at_once(loader)


TAKEN: dict[str, DataLoader[Any]] = {
    "shuffled": DataLoader(DATA, 4, shuffle=True),
    "a part": DataLoader(Subset(DATA, [3, 1, 2]), 2, shuffle=True),
    "as many as there are": DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=23)),
    "by a batch sampler": DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 6, drop_last=True)),
}


@pytest.mark.parametrize("loader", TAKEN.values(), ids=TAKEN)
def test_loaders_that_shuffle_as_most_do_are_taken(loader: DataLoader[Any]) -> None:
    assert can_draw_at_once(loader)


@pytest.fixture
def _asked_anew() -> Iterator[None]:
    """PyTorch is compared with anew, in this test and in those after it."""
    order._is_as_pytorch_draws.cache_clear()
    yield
    order._is_as_pytorch_draws.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
def test_a_pytorch_that_draws_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = RandomSampler.__iter__

    def another(self: RandomSampler) -> Iterator[int]:
        torch.rand(1)
        return draw(self)

    monkeypatch.setattr(RandomSampler, "__iter__", another)
    assert not can_draw_at_once(DataLoader(DATA, 4, shuffle=True))


@pytest.mark.usefixtures("_asked_anew")
def test_the_question_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    assert can_draw_at_once(DataLoader(DATA, 4, shuffle=True))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("_asked_anew")
def test_the_question_leaves_the_random_state_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    assert can_draw_at_once(DataLoader(DATA, 4, shuffle=True))
    assert not seeds
