"""Where not all can be the same again, a resumption says so; and what else a loader may be."""

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

from hotloop.data import Stream
from hotloop.data.epochs import Position, Resumption
from hotloop.data.loader_rng import LoaderRngState
from hotloop.errors import BadArgument

from ..thorough import dealt
from .test_position import AtOnce, Augmented, seeded, values

DATA = TensorDataset(torch.arange(17.0))


def read(batches: Stream[Any], count: int) -> list[list[float]]:
    return [values(batch) for _, batch in zip(range(count), batches, strict=False)]


def resumed(build: Callable[[], Any], position: Position) -> tuple[Stream[Any], Resumption]:
    """A stream over a new loader that goes on from a position, with the rng states of now."""
    now = LoaderRngState.now()
    batches: Stream[Any] = Stream(build(), "cpu", "direct")
    resumption = batches.resume(Position.from_state_dict(position.state_dict()))
    now.restore()
    return batches, resumption


def stopped(build: Callable[[], Any], count: int, epochs: int = 0) -> tuple[Stream[Any], Position]:
    batches: Stream[Any] = Stream(build(), "cpu", "direct")
    for _ in range(epochs):
        list(batches)
    read(batches, count)
    return batches, batches.position(count)


def test_another_number_of_workers_for_what_is_always_the_same() -> None:
    def build(workers: int) -> DataLoader[Any]:
        return DataLoader(DATA, 2, shuffle=True, generator=seeded(), num_workers=workers)

    _, position = stopped(partial(build, 1), 3, 1)
    here, resumption = resumed(partial(build, 0), position)
    assert resumption.reason is None
    plain: list[Any] = []
    whole = build(0)
    for _ in range(3):
        plain += [values(batch) for batch in whole]
    assert [values(b) for b in here] + [values(b) for b in here] == plain[9 + 3 :]


def test_workers_that_stay_and_an_epoch_that_was_left_early() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(Augmented(), 2, num_workers=1, persistent_workers=True)

    batches: Stream[Any] = Stream(build(), "cpu")
    read(batches, 2)
    read(batches, 3)
    assert "persist carry their rng states" in (batches.position(3).reason or "")
    list(batches)
    read(batches, 1)
    assert batches.position(1).reason is None, "an epoch that was read to its end tells all states"


class Flowing(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(12.0)


def test_workers_that_stay_over_an_iterable() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(Flowing(), 2, num_workers=1, persistent_workers=True)

    _, position = stopped(build, 2, 1)
    here, resumption = resumed(build, position)
    assert "persist" in (resumption.reason or "")
    assert read(here, 9) == [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert len(read(here, 9)) == 6


def shuffled(data: Any = DATA, size: int = 2, **options: Any) -> Callable[[], Any]:
    return partial(DataLoader, data, size, shuffle=True, **options)


OTHER: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {  # a loader then and now, and what is said
    "another batch size": (shuffled(), shuffled(size=3), "has changed"),
    "more data": (shuffled(), shuffled(TensorDataset(torch.arange(19.0))), "has changed"),
    "less data": (shuffled(), shuffled(TensorDataset(torch.arange(4.0))), "has changed"),
    "in order": (shuffled(), partial(DataLoader, DATA, 2), "has changed"),
    "a generator": (shuffled(), shuffled(generator=seeded()), "generators"),
    "workers": (shuffled(Augmented(), num_workers=1), shuffled(Augmented()), "num_workers=1 and has 0 now.*same"),
    "out of order": (shuffled(num_workers=1, in_order=False), shuffled(), "in_order=False"),
}


@pytest.mark.parametrize(("then", "now", "says"), OTHER.values(), ids=OTHER)
def test_a_loader_that_is_another_one_now(then: Callable[[], Any], now: Callable[[], Any], says: str) -> None:
    _, position = stopped(then, 3)
    assert re.search(says, resumed(now, position)[1].reason or "")


@pytest.mark.parametrize("batch", [2, 3])
def test_data_on_the_device_that_is_drawn_without_the_stream(batch: int) -> None:
    """As several steps in one CUDA graph do: the origin of the stream is that of an earlier epoch then."""
    there: Stream[Any] = Stream(DataLoader(DATA, 2, shuffle=True), "cpu", "resident")
    read(there, 4)
    draws = there.resident.draws()
    drawn = [next(draws) for _ in range(4)]
    here: Stream[Any] = Stream(DataLoader(DATA, batch, shuffle=True), "cpu", "resident")
    resumption = here.resume(there.position(4))
    assert ("has changed" in (resumption.reason or "")) == (batch != 2)
    assert len(drawn) == 4


def test_an_iterator_goes_on_from_epoch_to_epoch() -> None:
    batches: Stream[Any] = Stream(iter([torch.ones(1) * i for i in range(6)]), "cpu")
    read(batches, 2)
    assert batches.position(2).reason is None
    here, _ = resumed(lambda: iter([torch.ones(1) * i for i in range(6)]), batches.position(2))
    assert read(here, 1) == [[2]]
    read(batches, 1)
    assert "is an iterator" in (batches.position(1).reason or "")


class InChunks(Sampler[int]):
    """Draws a part of the order now and then, from the global generator."""

    def __iter__(self) -> Iterator[int]:
        for start in range(0, 16, 4):
            yield from (start + torch.randperm(4)).tolist()

    def __len__(self) -> int:
        return 16


@pytest.mark.parametrize("others", [False, True])
def test_a_sampler_that_draws_on_the_way_what_others_draw_too(others: bool) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(DATA, 2, sampler=InChunks())

    seen = []
    whole: Stream[Any] = Stream(build(), "cpu", "direct")
    torch.manual_seed(1)
    for _ in whole:
        torch.rand(int(others))
        seen.append(whole.origin.indices if whole.origin else None)
    torch.manual_seed(1)
    batches: Stream[Any] = Stream(build(), "cpu", "direct")
    for number, _ in enumerate(batches, 1):
        torch.rand(int(others))
        if number == 5:
            break
    here, resumption = resumed(build, batches.position(5))
    assert (resumption.reason is not None) == others
    if not others:
        assert [here.origin.indices for _ in here if here.origin] == seen[5:]


def test_a_batch_that_was_given_and_not_trained_on() -> None:
    batches: Stream[Any] = Stream(DataLoader(Augmented(), 2), "cpu")
    read(batches, 3)
    assert "not trained on" in (batches.position(2).reason or "")
    constant: Stream[Any] = Stream(DataLoader(DATA, 2), "cpu", "direct")
    read(constant, 3)
    here, resumption = resumed(lambda: DataLoader(DATA, 2), constant.position(2))
    assert resumption.reason is None
    assert read(here, 1) == [[4, 5]]


def test_a_generator_that_others_draw_from_too() -> None:
    """An evaluation in the middle of an epoch, with a loader that shares the generator."""

    def run(stop: int | None) -> list[Any]:
        torch.manual_seed(3)
        generator = seeded()
        batches: Stream[Any] = Stream(DataLoader(DATA, 4, shuffle=True, generator=generator), "cpu")
        seen = []
        for _ in range(2):
            for number, batch in enumerate(batches, 1):
                seen.append(values(batch))
                if number == 2:
                    list(DataLoader(DATA, 4, generator=generator))
                if number == stop:
                    position, now = batches.position(number), LoaderRngState.now()
                    generator, stop = seeded(1), None
                    batches = Stream(DataLoader(DATA, 4, shuffle=True, generator=generator), "cpu")
                    batches.resume(position)
                    now.restore()
                    seen += [values(batch) for batch in batches]
                    break
        return seen

    assert run(3) == run(None)


def test_a_sampler_that_knows_its_epoch() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(DATA, 3, sampler=DistributedSampler(DATA, num_replicas=2, rank=1))

    loader = build()
    whole: Stream[Any] = Stream(loader, "cpu")
    loader.sampler.set_epoch(4)
    expected = [values(batch) for batch in whole]
    assert read(whole, 1) == expected[:1]
    here, _ = resumed(build, whole.position(1))
    assert [values(batch) for batch in here] == expected[1:]


class Keeping:
    """A loader that tells where it is, and reads nothing twice."""

    def __init__(self, more: Any = None) -> None:
        self.at = 0
        self.read = 0
        self.more = more

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < 6:
            self.at += 1
            self.read += 1
            yield torch.tensor([float(self.at)])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "more": self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize(("more", "loaded"), [(None, 0), (object(), 4)])
def test_a_loader_that_knows_where_it_is(more: Any, loaded: int) -> None:
    """Where it tells more than plain data, it is read again like any other."""
    _, position = stopped(partial(Keeping, more), 4, 1)
    here, resumption = resumed(Keeping, position)
    assert (resumption.skipped, resumption.loaded) == (4, loaded)
    assert [values(batch) for batch in here] == [[5], [6]]
    assert isinstance(here.loader, Keeping)
    assert here.loader.read == 2 + loaded
    assert len(list(here)) == 6


def seed_by_python(worker: int) -> None:
    torch.manual_seed(1000 + worker)


def test_a_worker_init_fn() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(Augmented(), 2, num_workers=2, worker_init_fn=seed_by_python, persistent_workers=True)

    torch.manual_seed(3)
    whole: Stream[Any] = Stream(build(), "cpu")
    expected = [[values(batch) for batch in whole] for _ in range(3)]
    torch.manual_seed(3)
    _, position = stopped(build, 4, 1)
    torch.manual_seed(8)
    here, resumption = resumed(build, position)
    assert resumption.reason is None
    assert [values(batch) for batch in here] == expected[1][4:]
    assert [values(batch) for batch in here] == expected[2]


def test_a_count_that_cannot_be() -> None:
    batches: Stream[Any] = Stream([torch.ones(1)], "cpu")
    with pytest.raises(BadArgument, match="0 batches of the epoch were read"):
        batches.position(0)
    list(batches)
    for count in (-1, 2):
        with pytest.raises(BadArgument, match=f"consumed={count}"):
            batches.position(count)


class BatchesAtOnce(AtOnce):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(17).split(2))


ORDERS: dict[str, Callable[..., Any]] = {
    "shuffled": lambda **how: DataLoader(DATA, 2, shuffle=True, generator=seeded(), **how),
    "drawn at once": lambda **how: DataLoader(DATA, 2, sampler=AtOnce(), **how),
    "batches drawn at once": lambda **how: DataLoader(DATA, batch_sampler=BatchesAtOnce(), **how),
}
HOW: dict[str, dict[str, Any]] = {
    "here": {},
    "workers": {"num_workers": 2},
    "staying": {"num_workers": 1, "persistent_workers": True},
}


@pytest.mark.parametrize(("way", "kind"), dealt([*product(ORDERS, HOW)], ["direct", "resident"]), ids=str)
def test_an_epoch_that_is_left_early_and_the_next_ones(way: tuple[str, str], kind: Any) -> None:
    """Workers have drawn ahead when an epoch is left; data on the device draws as far ahead as they do."""
    build, how = ORDERS[way[0]], HOW[way[1]]
    seen = []
    for batches in (build(**how), Stream(build(**how), "cpu", kind)):
        torch.manual_seed(3)
        epochs: list[Any] = []
        for stop in (4, 7, 9):
            epochs.append([values(batch) for _, batch in zip(range(stop), batches, strict=False)])
        seen.append(epochs)
    assert seen[0] == seen[1]


def test_the_states_of_python_are_left_alone_in_a_normal_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are slow to read, and the order of such a loader does not depend on them."""
    monkeypatch.setattr(random, "getstate", None)
    monkeypatch.setattr(np.random, "get_state", None)
    for kind in ("direct", "resident"):
        batches: Stream[Any] = Stream(DataLoader(DATA, 2, shuffle=True), "cpu", kind)
        assert len(list(batches)) == 9
