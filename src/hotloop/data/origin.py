"""Where a batch comes from: twins of a DataLoader that tell which samples each batch holds."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from hotloop.data.forking import forking
from hotloop.errors import BadArgument, EmptyLoader
from hotloop.placement import tensors_in
from hotloop.text import an, plural

MOST_SAMPLES_LOOKED_AT = 4096


@dataclass(frozen=True)
class BatchOrigin:
    """Where a batch comes from."""

    number: int  # of the batch in its epoch, from 0
    drawn: Any = None  # what the sampler drew: an index or several; None where the loader does not tell
    dataset: Any = None

    @property
    def indices(self) -> tuple[int, ...] | None:
        """The samples of the batch in the dataset, where the sampler draws numbers; made only when asked for."""
        try:
            several = self.drawn if isinstance(self.drawn, Iterable) else [self.drawn]
            return tuple(index(i) for i in several)
        except TypeError:  # keys, slices, or nothing
            return None

    def broken_samples(self) -> list[int]:
        """Indices of the samples that hold NaN or infinity themselves; what cannot be looked at is left out."""
        broken = []
        for i in (self.indices or ())[:MOST_SAMPLES_LOOKED_AT]:
            with suppress(Exception):  # a dataset may fail in any way, and the loss is what matters here
                if _is_broken(self.dataset[i]):
                    broken.append(i)
        return broken


def is_in_order(loader: object) -> bool:
    """Whether a loader is a DataLoader whose batches come in the order in which their indices are drawn."""
    return (
        type(loader) is DataLoader
        and hasattr(loader.dataset, "__getitem__")
        and isinstance(loader.dataset, Sized)
        and getattr(loader, "in_order", True)
    )


class Tap:
    """A twin of a DataLoader that also tells what its sampler drew.

    The twin shares everything with the loader it copies, sampler and generator included, so it gives exactly the
    batches that the loader would have given.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset = loader.dataset
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self.sampler = Remembering(getattr(loader, name))
        self.loader = twin(loader, **{name: self.sampler})

    def begin(self, first: int = 0) -> Iterator[tuple[BatchOrigin, Any]]:
        """The batches of an epoch, the iterator of which is made at once; `first` is the number of the first one."""
        with forking():
            batches = iter(self.loader)
        return self._named(batches, self.sampler.drawn, first)  # another epoch may begin before this one ends

    def _named(self, batches: Iterator[Any], drawn: deque[Any], first: int) -> Iterator[tuple[BatchOrigin, Any]]:
        for number, batch in enumerate(batches, first):
            yield BatchOrigin(number, drawn.popleft(), self.dataset), batch


def twin(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """A shallow copy of a loader with some attributes changed and workers of its own."""
    clone = copy.copy(loader)
    # Past __setattr__, which guards the loader that a person holds; this one is ours.
    clone.__dict__.update(changed, _iterator=None)
    return clone


class Remembering:
    """A sampler that keeps what it drew until the batch arrives."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.drawn: deque[Any] = deque()
        self.draws: Iterator[Any] = iter(())  # of the epoch that was begun last, before they are kept
        self.skip: Callable[[Iterator[Any]], None] | None = None  # drops the first draws of the next epoch
        self.silent = False  # whether an epoch has no draws

    def __iter__(self) -> Iterator[Any]:
        self.drawn = deque()
        if self.silent:
            return iter(())
        self.draws = iter(self.sampler)  # at once: some samplers draw now, others when they are asked
        return self._remember(self.draws, self.drawn)

    def _remember(self, draws: Iterator[Any], memory: deque[Any]) -> Iterator[Any]:
        if self.skip is not None:  # by the time of the first draw: a DataLoader with workers begins twice
            self.skip(draws)
            self.skip = None
        for drawn in draws:
            memory.append(drawn)
            yield drawn

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)


def length_of(loader: Iterable[Any]) -> int | None:
    """Batches per epoch, None where the loader does not tell."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # no length, or a DataLoader over a dataset that has none
        return None


def check_loader(loader: object, name: str = "the loader") -> None:
    """Refuse a dataset in place of a loader."""
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise BadArgument(
            f"{name} is {an(type(loader).__name__)}, which gives items one by one and no batches",
            fix="give it to a loader: DataLoader(dataset, batch_size=32, shuffle=True)",
        )


def check_readable_again(loader: object, fix: str) -> None:
    """Refuse what can be read only once, before anything is read of it."""
    if isinstance(loader, Iterator):
        raise BadArgument(
            f"{an(type(loader).__name__)} can be read only once, so that nothing would be left to train on", fix=fix
        )


def nothing_came(loader: object, name: str = "the loader") -> EmptyLoader:
    """The error for a loader that gave no batch."""
    if not isinstance(loader, DataLoader):
        return EmptyLoader(
            f"{name} gave no batch: {type(loader).__name__} is empty, or was used up by an earlier epoch",
            fix="pass a DataLoader or a list, which can be iterated again for every epoch",
        )
    why = "its sampler drew nothing"
    items = len(loader.dataset) if isinstance(loader.dataset, Sized) else None
    if not items:
        why = "its dataset is empty"
    elif loader.drop_last and loader.batch_size and items < loader.batch_size:
        why = f"its dataset has {plural(items, 'item')}, fewer than batch_size={loader.batch_size}, and drop_last is on"
    return EmptyLoader(f"{name} gave no batch: {why}", fix="check the dataset's length, batch_size and drop_last")


def _is_broken(sample: object) -> bool:
    return any(t.is_floating_point() and not bool(t.isfinite().all()) for _, t in tensors_in(sample))
