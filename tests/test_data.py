"""`Stream`: the loader's own batches, on the device, with their origin."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hotloop import stream
from hotloop.data import length_of
from hotloop.errors import EmptyLoader

DATA = TensorDataset(torch.arange(23.0))


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(7.0)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(DATA, 5),
    "shuffled": lambda: DataLoader(DATA, 5, shuffle=True, generator=seeded()),
    "shuffled by the global generator": lambda: DataLoader(DATA, 4, shuffle=True),
    "without the tail": lambda: DataLoader(DATA, 5, shuffle=True, generator=seeded(), drop_last=True),
    "own sampler": lambda: DataLoader(DATA, 3, sampler=WeightedRandomSampler([1.0] * 23, 11, generator=seeded())),
    "own batch sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=seeded()), 6, drop_last=False)
    ),
    "one by one": lambda: DataLoader(DATA, batch_size=None, shuffle=True, generator=seeded()),
    "two workers": lambda: DataLoader(DATA, 4, shuffle=True, generator=seeded(), num_workers=2),
    "workers that stay": lambda: DataLoader(
        DATA, 4, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
    ),
    "iterable": lambda: DataLoader(Endless(), 3),
}


def values(batch: Any) -> list[float]:
    tensor = batch[0] if isinstance(batch, list | tuple) else batch
    return tensor.reshape(-1).tolist()


@pytest.mark.parametrize("build", LOADERS.values(), ids=LOADERS)
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_exactly_the_batches_that_the_loader_would_have_given(build: Any) -> None:
    torch.manual_seed(11)
    loader = build()
    plain = [[values(batch) for batch in loader] for _ in range(2)]
    torch.manual_seed(11)
    streamed = stream(build(), "cpu")
    assert [[values(batch) for batch in streamed] for _ in range(2)] == plain


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "iterable"])
def test_the_origin_names_the_samples_of_each_batch(name: str) -> None:
    streamed = stream(LOADERS[name](), "cpu")
    for _ in range(2):
        for number, batch in enumerate(streamed):
            assert streamed.origin is not None
            assert streamed.origin.number == number
            assert list(streamed.origin.indices or ()) == values(batch)  # the data are their own indices


def test_an_iterable_dataset_has_no_indices() -> None:
    streamed = stream(LOADERS["iterable"](), "cpu")
    next(iter(streamed))
    assert streamed.origin is not None
    assert streamed.origin.indices is None


def test_the_loader_that_was_given_stays_as_it_was() -> None:
    loader = LOADERS["shuffled"]()
    before = dict(loader.__dict__)
    list(stream(loader, "cpu"))
    assert loader.__dict__ == before


def test_batches_arrive_on_the_device() -> None:
    assert next(iter(stream([{"x": torch.ones(2)}], "meta")))["x"].device.type == "meta"


EMPTY: dict[str, tuple[Any, str]] = {
    "list": (list, "list is empty"),
    "generator": (lambda: iter(()), "used up"),
    "dataset": (lambda: DataLoader(TensorDataset(torch.zeros(0))), "its dataset is empty"),
    "drop_last": (lambda: DataLoader(DATA, 50, drop_last=True), "fewer than batch_size=50"),
    "sampler": (lambda: DataLoader(DATA, sampler=[]), "sampler drew nothing"),
}


@pytest.mark.parametrize(("build", "says"), EMPTY.values(), ids=EMPTY)
def test_an_empty_loader_says_why(build: Any, says: str) -> None:
    with pytest.raises(EmptyLoader, match=says):
        list(stream(build(), "cpu"))


def test_broken_samples_are_found() -> None:
    data = torch.zeros(8, 2)
    data[3, 1], data[6, 0] = float("nan"), float("inf")
    streamed = stream(DataLoader(TensorDataset(data), 8), "cpu")
    list(streamed)
    assert streamed.origin is not None
    assert streamed.origin.broken_samples() == [3, 6]


def test_length() -> None:
    assert length_of(DataLoader(DATA, 5)) == 5
    assert length_of(iter([])) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert length_of(DataLoader(Endless())) is None
