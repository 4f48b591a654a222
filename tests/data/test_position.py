"""A run that is stopped inside an epoch and goes on in another process gets the batches that it would have got."""

import json
import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hotloop import stream
from hotloop.checkpoint.codec import pack, unpack
from hotloop.data import Stream
from hotloop.data.epochs import POSITION_FORMAT, Position
from hotloop.data.loader_rng import LoaderRngState
from hotloop.errors import BadArgument

from ..thorough import dealt, tries

EPOCHS = 3
Build = Callable[[], Any]


class Augmented(Dataset[list[Tensor]]):
    """Items that are other ones each time, by all the random numbers that people use."""

    def __init__(self, length: int = 17) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> list[Tensor]:
        noise = torch.rand(()).item() + random.random() + np.random.rand()  # noqa: S311
        return [torch.tensor([float(i), noise], dtype=torch.float64)]


class WithDice(Augmented):
    """Items that are made with generators which the dataset holds."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = {"numpy": np.random.default_rng(3), "old": np.random.RandomState(2), "python": random.Random(4)}  # noqa: S311
        self.torch = [torch.Generator().manual_seed(5)]

    def __getitem__(self, i: int) -> list[Tensor]:
        noise = self.rng["numpy"].random() + self.rng["old"].rand() + self.rng["python"].random()
        return [torch.tensor([float(i), noise + torch.rand((), generator=self.torch[0]).item()], dtype=torch.float64)]


class Counted(Dataset[Tensor]):
    """Items that are always the same, and how often each was made."""

    resident = True

    def __init__(self) -> None:
        self.made = torch.zeros(17).share_memory_()

    def __len__(self) -> int:
        return 17

    def __getitem__(self, i: int) -> Tensor:
        self.made[i] += 1
        return torch.tensor([float(i)])


class Flowing(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for i in range(19):
            yield torch.tensor([float(i), torch.rand(()).item(), np.random.rand()])


class AtOnce(Sampler[int]):
    """Draws the order as soon as it is asked for an iterator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(17).tolist())

    def __len__(self) -> int:
        return 17


class OfItsOwn(Sampler[list[int]]):
    """Batches of random sizes, drawn while the epoch runs, by generators of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(8)  # noqa: S311
        self.generator = torch.Generator().manual_seed(9)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(17, generator=self.generator).tolist()
        while order:
            size = self.rng.randint(1, 4)
            yield order[:size]
            order = order[size:]

    def __len__(self) -> int:
        return 8


class Lazy(Sampler[int]):
    """Each index is drawn from the global generator when it is needed."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(17):
            yield int(np.random.randint(17))

    def __len__(self) -> int:
        return 17


class Batches:
    """Any object that gives batches."""

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(6):
            yield torch.tensor([float(i), torch.rand(()).item(), random.random()])  # noqa: S311


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


DATA = TensorDataset(torch.arange(17.0).reshape(17, 1))
LOADERS: dict[str, Build] = {
    "in order": lambda: DataLoader(DATA, 3),
    "shuffled": lambda: DataLoader(DATA, 3, shuffle=True, generator=seeded()),
    "shuffled by the global generator": lambda: DataLoader(DATA, 3, shuffle=True),
    "without the tail": lambda: DataLoader(DATA, 3, shuffle=True, drop_last=True, generator=seeded()),
    "weighted": lambda: DataLoader(DATA, 3, sampler=WeightedRandomSampler([1.0] * 17, 14, generator=seeded())),
    "with replacement": lambda: DataLoader(
        DATA, 3, sampler=RandomSampler(DATA, replacement=True, num_samples=70, generator=seeded())
    ),
    "several rounds": lambda: DataLoader(DATA, 3, sampler=RandomSampler(DATA, num_samples=40, generator=seeded())),
    "a part": lambda: DataLoader(DATA, 3, sampler=SubsetRandomSampler(range(1, 17), generator=seeded())),
    "two generators": lambda: DataLoader(DATA, 3, sampler=RandomSampler(DATA, generator=seeded(7)), generator=seeded()),
    "one by one": lambda: DataLoader(DATA, batch_size=None, shuffle=True),
    "a sampler that draws at once": lambda: DataLoader(DATA, 3, sampler=AtOnce()),
    "a batch sampler of its own": lambda: DataLoader(DATA, batch_sampler=OfItsOwn()),
    "augmented": lambda: DataLoader(Augmented(), 3, shuffle=True),
    "augmented, own generator": lambda: DataLoader(Augmented(), 3, shuffle=True, generator=seeded(), drop_last=True),
    "augmented, drawn at once": lambda: DataLoader(Augmented(), 3, sampler=AtOnce()),
    "generators in the dataset": lambda: DataLoader(WithDice(), 3, shuffle=True),
    "index by index": lambda: DataLoader(Augmented(), 3, sampler=Lazy()),
    "a subset of batches": lambda: DataLoader(
        Augmented(), batch_sampler=BatchSampler(RandomSampler(range(13)), 2, drop_last=True)
    ),
    "iterable": lambda: DataLoader(Flowing(), 4),
    "a list": lambda: [torch.tensor([float(i)]) for i in range(6)],
    "any object": Batches,
}
WITH_WORKERS: dict[str, Build] = {
    "constant": lambda: DataLoader(DATA, 3, shuffle=True, generator=seeded(), num_workers=2),
    "constant, drawn at once": lambda: DataLoader(DATA, 3, sampler=AtOnce(), num_workers=1),
    "augmented": lambda: DataLoader(Augmented(), 3, shuffle=True, num_workers=2, prefetch_factor=1),
    "iterable": lambda: DataLoader(Flowing(), 4, num_workers=2),
    "constant, staying": lambda: DataLoader(DATA, 2, shuffle=True, num_workers=1, persistent_workers=True),
    "augmented, staying": lambda: DataLoader(
        Augmented(), 3, shuffle=True, generator=seeded(), num_workers=2, persistent_workers=True
    ),
}

EVERY = LOADERS | {f"workers: {name}": build for name, build in WITH_WORKERS.items()}


def seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def values(batch: Any) -> list[float]:
    tensor = batch[0] if isinstance(batch, list | tuple) else batch
    return tensor.reshape(-1).tolist()


def carried_over(position: Position) -> Position:
    """The position as another process gets it, from a checkpoint."""
    tensors, data = pack(position.state_dict())
    return Position.from_state_dict(unpack({n: t.clone() for n, t in tensors.items()}, json.loads(json.dumps(data))))


class Run:
    """A run over a stream; `trained` draws from the global generator between batches, as dropout does on a CPU."""

    def __init__(self, build: Build, kind: Any, *, trained: bool = True, **how: Any) -> None:
        self.stream: Stream[Any] = Stream(build(), "cpu", kind, **how)
        self.trained = trained
        self.seen: list[Any] = []

    def epoch(self, stop: int | None = None) -> None:
        if stop == 0:
            return
        batches = self.stream.resident.draws() if self.by_draws else self.stream
        for number, batch in enumerate(batches, self.stream.first if self.by_draws else 0):
            if self.by_draws:
                self.stream.origin = self.stream.resident.origin(number, batch)
                self.seen.append(torch.as_tensor(batch).reshape(-1).tolist())
            else:
                self.seen.append(values(batch))
            if self.trained:
                torch.rand(3)
            if stop is not None and number + 1 == stop:
                return
        self.seen.append("end")

    by_draws = False


class ByDraws(Run):
    by_draws = True


def whole(make: Callable[[], Run], epochs: int = EPOCHS) -> list[Any]:
    seed_all(3)
    run = make()
    for _ in range(epochs):
        run.epoch()
    return [*run.seen, *states(run)]


def states(run: Run) -> list[Any]:
    return [hash(torch.get_rng_state().numpy().tobytes()), random.getstate(), np.random.rand()]


def in_two(make: Callable[[], Run], epoch: int, stop: int, epochs: int = EPOCHS) -> tuple[list[Any], Any]:
    """The same run, stopped after some batches of an epoch, and another that continues from there."""
    seed_all(3)
    run = make()
    for _ in range(epoch):
        run.epoch()
    run.epoch(stop)
    position = carried_over(run.stream.position(stop or None))
    at = LoaderRngState.now()
    seed_all(99)
    again = make()
    resumption = again.stream.resume(position)
    at.restore()
    for _ in range(epochs - epoch):
        again.epoch()
    return [*run.seen, *again.seen, *states(again)], resumption


MOMENTS = [(0, 1), (0, 4), (1, 5), (2, 0), (1, 2)]  # an epoch, and after how many of its batches the run is stopped


@cache
def whole_run(name: str, kind: Any) -> list[Any]:
    """What a run gives that nobody stops; the same for all moments."""
    return whole(partial(Run, EVERY[name], kind))


@pytest.mark.parametrize(("name", "moment"), dealt(list(LOADERS), MOMENTS, each=2), ids=str)
@pytest.mark.parametrize("kind", ["auto", "direct"])
def test_the_rest_is_what_it_would_have_been(name: str, kind: Any, moment: tuple[int, int]) -> None:
    assert in_two(partial(Run, LOADERS[name], kind), *moment)[0] == whole_run(name, kind)


@pytest.mark.parametrize(
    ("name", "moment"), dealt([*map("workers: {}".format, WITH_WORKERS)], [(0, 2), (1, 5), (1, 6), (2, 0)]), ids=str
)
def test_with_workers(name: str, moment: tuple[int, int]) -> None:
    seen, resumption = in_two(partial(Run, EVERY[name], "direct"), *moment)
    assert seen == whole_run(name, "direct")
    assert resumption.reason is None


@pytest.mark.parametrize("name", ["constant", "constant, drawn at once", "constant, staying"])
@pytest.mark.parametrize(("epoch", "stop"), [(0, 2), (1, 5), (2, 0)])
def test_data_on_the_device_of_a_loader_with_workers(name: str, epoch: int, stop: int) -> None:
    make = partial(ByDraws, WITH_WORKERS[name], "resident")
    seen, resumption = in_two(make, epoch, stop)
    assert seen == whole(make)
    assert resumption.loaded == 0


@settings(deadline=None, max_examples=tries(20, 150))
@given(data=st.data(), items=st.integers(1, 30), size=st.integers(1, 9), drop_last=st.booleans())
def test_whatever_the_sizes(data: Any, items: int, size: int, drop_last: bool) -> None:
    length = items // size if drop_last else -(-items // size)
    if not length:
        return
    generator = data.draw(st.sampled_from([None, 1, 2]))
    dataset: Any = data.draw(st.sampled_from([TensorDataset(torch.arange(float(items))), Augmented(items)]))
    make = partial(
        data.draw(st.sampled_from([Run, ByDraws])) if isinstance(dataset, TensorDataset) else Run,
        lambda: DataLoader(
            dataset, size, shuffle=True, drop_last=drop_last, generator=None if generator is None else seeded(generator)
        ),
        "auto",
    )
    epoch, stop = data.draw(st.integers(0, 2)), data.draw(st.integers(0, length))
    seen, resumption = in_two(make, epoch, stop)
    assert seen == whole(make)
    assert (resumption.skipped, resumption.loaded, resumption.reason) == (stop, 0, None)


@settings(deadline=None, max_examples=tries(20, 60))
@given(name=st.sampled_from(sorted(LOADERS)), stops=st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_stopped_again_and_again(name: str, stops: list[int]) -> None:
    """Also in the epoch that was resumed, each time in a new process."""
    make = partial(Run, LOADERS[name], "auto")
    seed_all(3)
    run, seen = make(), []
    for stop in sorted(set(stops)):
        for number, batch in enumerate(run.stream, run.stream.first + 1):
            seen.append(values(batch))
            torch.rand(3)
            if number == stop:
                break
        assert run.stream.origin.number + 1 == stop
        position, at = carried_over(run.stream.position(stop)), LoaderRngState.now()
        seed_all(stop)
        run = make()
        run.stream.resume(position)
        at.restore()
    run.epoch()
    run.epoch()
    assert seen + run.seen + states(run) == whole(make, 2)


@pytest.mark.parametrize("kind", ["auto", "direct"])
@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_constant_is_loaded_twice(kind: Any, workers: int) -> None:
    made = Counted()
    if kind == "auto":
        stream(DataLoader(made, 3), "cpu")  # looks at one item, to see what it is
        list(stream(DataLoader(made, 3), "cpu"))
        made.made.zero_()
    loader = partial(DataLoader, made, 3, shuffle=True, generator=seeded(), num_workers=workers, prefetch_factor=None)
    run = Run(partial(loader, prefetch_factor=1) if workers else loader, kind)
    run.epoch(2)
    position = run.stream.position(2)
    del run
    made.made.zero_()
    again = Run(partial(loader, prefetch_factor=1) if workers else loader, kind)
    made.made.zero_()
    assert again.stream.resume(position).loaded == 0
    again.epoch()
    assert made.made.sum().item() == (0 if kind == "auto" else 17 - 6)


def test_what_has_to_be_loaded_again_is_told() -> None:
    told = []
    run = Run(WITH_WORKERS["augmented"], "direct")
    run.epoch(3)
    position = run.stream.position(3)
    again = stream(WITH_WORKERS["augmented"](), "cpu")
    assert again.resume(position, lambda done, of: told.append((done, of))).loaded == 3
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    "damage", [{"format": POSITION_FORMAT - 1}, {"began": None}, {"ahead": [{"more": 1}]}, {"more": 1}, [], None]
)
def test_a_state_of_something_else_is_refused(damage: Any) -> None:
    run = Run(LOADERS["in order"], "direct")
    run.epoch(2)
    state = run.stream.position(2).state_dict()
    assert Position.from_state_dict(state).consumed == 2
    with pytest.raises(BadArgument, match="no position of a loader"):
        Position.from_state_dict(state | damage if isinstance(damage, dict) else damage)


class Ahead:
    """A stream that reads ahead of the training on a machine without a GPU, by as much as one with a GPU does."""

    def __call__(self, batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
        ready: list[Any] = []
        while True:
            while len(ready) <= 2 and (following := next(batches, None)) is not None:
                ready.append(following)
            if not ready:
                return
            yield ready.pop(0)


@pytest.fixture
def _prefetching(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("hotloop.data.streams")  # the package gives the function of that name
    monkeypatch.setattr(module, "_copied_ahead", Ahead())
    monkeypatch.setattr(module, "_choose", lambda loader, device, kind: ("prefetched", "a test"))


@pytest.mark.usefixtures("_prefetching")
@pytest.mark.parametrize(
    ("name", "moment"),
    dealt([*LOADERS, "workers: constant", "workers: augmented"], [(0, 1), (0, 4), (1, 5), (1, 2)], 2),
    ids=str,
)
def test_batches_that_were_read_ahead(name: str, moment: tuple[int, int]) -> None:
    assert in_two(partial(Run, EVERY[name], "prefetched"), *moment)[0] == whole_run(name, "prefetched")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["direct", "prefetched", "resident"])
@pytest.mark.parametrize("name", ["shuffled", "shuffled by the global generator", "without the tail", "augmented"])
def test_on_cuda(kind: Any, name: str) -> None:
    if name == "augmented" and kind == "resident":
        return
    seen = []
    for stop in (None, 1, 4, 5):
        seed_all(3)
        torch.cuda.manual_seed(3)
        batches = Stream(LOADERS[name](), "cuda", kind)
        assert batches.kind == kind
        got: list[Any] = []
        if stop is not None:
            for _, batch in zip(range(stop), batches, strict=False):
                got.append(values(batch))
            position, at = carried_over(batches.position(stop)), LoaderRngState.now()
            seed_all(98)
            batches = Stream(LOADERS[name](), "cuda", kind)
            assert batches.resume(position).reason is None
            at.restore()
        for _ in range(2):
            got += [values(batch) for batch in batches]
        seen.append(got)
    assert seen[1:] == seen[:1] * 3
