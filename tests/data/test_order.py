"""The order drawn at once is the order of the DataLoader, and it uses random numbers as the DataLoader does."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
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
from .test_position import Flowing


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
        batches = draws_at_once(loader, seeds_workers=False) if ours else loader.batch_sampler
        seen.append([torch.as_tensor(batch).tolist() for batch in batches] + [torch.get_rng_state().tolist()])
    assert seen[0] == seen[1]


def test_a_dataset_that_grows_is_seen_in_the_next_epoch() -> None:
    data = rows(3)
    loader = DataLoader(data, 2, shuffle=True)
    assert sorted(torch.cat(list(draws_at_once(loader, seeds_workers=True))).tolist()) == [0, 1, 2]
    data.tensors = (torch.arange(5),)
    assert sorted(torch.cat(list(draws_at_once(loader, seeds_workers=True))).tolist()) == [0, 1, 2, 3, 4]


class Backwards(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source) - 1, -1, -1))


class Doubled(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return (batch * 2 for batch in super().__iter__())


DATA = rows(23)
WAYS: dict[str, tuple[DataLoader[Any], bool]] = {  # whether it shuffles as most do
    "shuffled": (DataLoader(DATA, 4, shuffle=True), True),
    "a part": (DataLoader(Subset(DATA, [3, 1, 2]), 2, shuffle=True), True),
    "as many as there are": (DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=23)), True),
    "by a batch sampler": (DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 6, drop_last=True)), True),
    "with replacement": (DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)), False),
    "fewer than all": (DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=22)), False),
    "more than all": (DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=46)), False),
    "in order": (DataLoader(DATA, 4), False),
    "in order, by name": (DataLoader(DATA, 4, sampler=SequentialSampler(DATA)), False),
    "a subset": (DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(23))), False),
    "weighted": (DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 23, 23)), False),
    "a list of indices": (DataLoader(DATA, 4, sampler=list(range(23))), False),
    "a sampler of one's own": (DataLoader(DATA, 4, sampler=Backwards(DATA)), False),
    "batches of one's own": (DataLoader(DATA, batch_sampler=Doubled(RandomSampler(DATA), 4, False)), False),
    "one by one": (DataLoader(DATA, batch_size=None, shuffle=True), False),
    "iterable": (DataLoader(Flowing(), 4), False),
}


@pytest.mark.parametrize(("loader", "taken"), WAYS.values(), ids=WAYS)
def test_only_loaders_that_shuffle_as_most_do_are_taken(loader: DataLoader[Any], taken: bool) -> None:
    assert can_draw_at_once(loader) is taken


@pytest.mark.parametrize("otherwise", [False, True])
def test_pytorch_is_compared_with_and_random_states_stay(otherwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, seeds = RandomSampler.__iter__, list[int]()

    def another(self: RandomSampler) -> Iterator[int]:
        torch.rand(1)
        return draw(self)

    if otherwise:
        monkeypatch.setattr(RandomSampler, "__iter__", another)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    order._is_as_pytorch_draws.cache_clear()  # PyTorch is compared with anew, here and in tests after this one
    before = torch.get_rng_state()
    try:
        assert can_draw_at_once(DataLoader(DATA, 4, shuffle=True)) is not otherwise
    finally:
        order._is_as_pytorch_draws.cache_clear()
    assert torch.equal(before, torch.get_rng_state())
    assert not seeds
