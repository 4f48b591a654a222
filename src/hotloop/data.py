"""`Stream`: batches that are already on the device, and where in the data each one comes from."""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from hotloop.errors import EmptyLoader
from hotloop.placement import move, tensors_in

T = TypeVar("T")
MOST_SAMPLES_LOOKED_AT = 4096


@dataclass(frozen=True)
class Origin:
    """Where a batch comes from."""

    number: int  # of the batch in its epoch, from 0
    indices: tuple[int, ...] | None = None  # of its samples in the dataset; None where the loader does not tell
    dataset: Any = None

    def broken_samples(self) -> list[int]:
        """Indices of the samples that hold NaN or infinity themselves."""
        return [i for i in (self.indices or ())[:MOST_SAMPLES_LOOKED_AT] if _is_broken(self.dataset[i])]


class Stream(Generic[T]):
    """The batches of a loader on a device; iterate it once per epoch."""

    def __init__(self, loader: Iterable[T], device: str | torch.device) -> None:
        self.loader = loader
        self.device = torch.device(device)
        self.origin: Origin | None = None  # of the batch that was given out last
        self._tap = _Tap.on(loader)

    def __iter__(self) -> Iterator[T]:
        number = -1
        for number, batch in enumerate(self._tap.loader if self._tap else self.loader):
            self.origin = self._tap.origin(number) if self._tap else Origin(number)
            yield move(batch, self.device)
        if number < 0:
            raise EmptyLoader(f"the loader gave no batch: {_emptiness(self.loader)}", fix=_filling(self.loader))


def stream(loader: Iterable[T], device: str | torch.device) -> Stream[T]:
    """The batches of `loader`, each one on `device` when you get it.

    >>> [batch.sum().item() for batch in stream([torch.ones(2), torch.ones(3)], "cpu")]
    [2.0, 3.0]
    """
    return Stream(loader, device)


def length_of(loader: Iterable[Any]) -> int | None:
    """Batches per epoch, None where the loader does not tell."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # no length, or a DataLoader over a dataset that has none
        return None


class _Tap:
    """A twin of a DataLoader that also tells which samples each batch holds.

    The twin shares everything with the loader it copies, sampler and generator included, so it gives exactly the
    batches that the loader would have given.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset = loader.dataset
        self.loader = copy.copy(loader)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler = _Remembering(getattr(loader, name))
        # Past __setattr__, which guards the loader that a person holds; this one is ours. Its workers are its own too.
        self.loader.__dict__.update({name: self._sampler, "_iterator": None})

    @classmethod
    def on(cls, loader: object) -> "_Tap | None":
        """A tap where batches come in the order in which their indices are drawn, None elsewhere."""
        if type(loader) is not DataLoader or not hasattr(loader.dataset, "__getitem__"):
            return None
        in_order = getattr(loader, "in_order", True) and isinstance(loader.dataset, Sized)
        return cls(loader) if in_order else None

    def origin(self, number: int) -> Origin:
        drawn = self._sampler.drawn.popleft()
        indices = tuple(drawn) if isinstance(drawn, list | tuple) else (drawn,)
        return Origin(number, tuple(int(i) for i in indices), self.dataset)


class _Remembering:
    """A sampler that keeps what it drew until the batch arrives."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.drawn: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.drawn.clear()
        for index in self.sampler:
            self.drawn.append(index)
            yield index

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)


def _is_broken(sample: object) -> bool:
    return any(t.is_floating_point() and not bool(t.isfinite().all()) for _, t in tensors_in(sample))


def _emptiness(loader: object) -> str:
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} is empty, or was used up by an earlier epoch"
    items = len(loader.dataset) if isinstance(loader.dataset, Sized) else None
    if not items:
        return "its dataset is empty"
    if loader.drop_last and loader.batch_size and items < loader.batch_size:
        return f"its dataset has {items} items, fewer than batch_size={loader.batch_size}, and drop_last is on"
    return "its sampler drew nothing"


def _filling(loader: object) -> str:
    if isinstance(loader, DataLoader):
        return "check the dataset's length, batch_size and drop_last"
    return "pass a DataLoader or a list, which can be iterated again for every epoch"
