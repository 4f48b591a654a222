"""Where a batch comes from: twins of a DataLoader that tell which samples each batch holds."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import index
from types import MethodType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate, default_convert

from hotloop.data.kept import EpochWorkers, may_keep
from hotloop.errors import BadArgument, EmptyLoader
from hotloop.placement import tensors_in
from hotloop.printing.text import an, plural

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
        and not isinstance(loader.dataset, IterableDataset)  # whose iterator is asked for items, not for indices
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
        self._workers = EpochWorkers(self.loader, keep=may_keep(loader)) if loader.num_workers else None
        self._epoch: _TappedEpoch | None = None  # the one that was begun last

    def begin(self, first: int = 0, seed: int | None = None) -> Iterator[tuple[BatchOrigin, Any]]:
        """The batches of an epoch, the iterator of which is made at once; `first` is the number of the first one.

        With `seed`, workers get theirs from it, and the loader's generator is not drawn from for them.
        """
        last, sampler, own = self._epoch, self.sampler, self.loader.generator
        batches: Iterator[Any]
        if self._workers is None:
            batches = iter(self.loader)
        else:
            # An epoch that was left early has batches under way, and one that is resumed begins with draws to skip.
            again = last is not None and last.ended and sampler.skip is None
            if seed is not None:
                self.loader.__dict__["generator"] = torch.Generator().manual_seed(seed)
            try:
                batches = self._workers.begin(again=again)
            finally:
                self.loader.__dict__["generator"] = own
        self._epoch = epoch = _TappedEpoch(sampler.latest)  # another may begin before this one ends
        return self._named(batches, epoch, first)

    def _named(self, batches: Iterator[Any], epoch: "_TappedEpoch", first: int) -> Iterator[tuple[BatchOrigin, Any]]:
        try:
            for number, batch in enumerate(batches, first):
                yield BatchOrigin(number, epoch.draws.drawn.popleft(), self.dataset), batch
            epoch.ended = True
        finally:
            if self._workers is not None and self._epoch is epoch and not epoch.ended:
                self._workers.end()

    def end_workers(self, *, persistent: bool = False) -> None:
        """End workers that wait for the next epoch; those that the person asked for only if `persistent`."""
        if self._workers is not None and (self._epoch is None or self._epoch.ended):
            self._workers.end(persistent=persistent)

    def why_workers_stay(self) -> str | None:
        """Why other workers would not do as these do; None where they would."""
        if self._workers is not None and not self._workers.are_as_started():
            return "the dataset was changed after its workers were started, which do not see that"
        return None


class _TappedEpoch:
    """An epoch of a tap: what is drawn for it, and whether it was read to its end."""

    def __init__(self, draws: "Draws") -> None:
        self.draws = draws
        self.ended = False


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
        self.latest = Draws(self, iter(()))  # of the epoch that was begun last
        self.skip: Callable[[Iterator[Any]], None] | None = None  # drops the first draws of the next epoch
        self.silent = False  # whether an epoch has no draws

    def __iter__(self) -> Iterator[Any]:
        # At once: some samplers draw now, others when they are asked.
        self.latest = Draws(self, iter(()) if self.silent else iter(self.sampler))
        return self.latest

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)


class Draws:
    """What a sampler draws in one epoch; `drawn` are those whose batches have not arrived."""

    def __init__(self, owner: Remembering, draws: Iterator[Any]) -> None:
        self.draws = draws
        self.drawn: deque[Any] = deque()
        self._owner = owner

    def __iter__(self) -> "Draws":
        return self

    def __next__(self) -> Any:
        owner = self._owner
        if owner.skip is not None:  # by the time of the first draw: a DataLoader with workers begins twice
            skip, owner.skip = owner.skip, None
            skip(self.draws)
        drawn = next(self.draws)
        self.drawn.append(drawn)
        return drawn


def length_of(loader: Iterable[Any]) -> int | None:
    """Batches per epoch, None where the loader does not tell."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # no length, or a DataLoader over a dataset that has none
        return None


def owner_of(thing: Any) -> Any:
    """The owner of a callable's state: the object of a method, the function of a partial."""
    for _ in range(8):
        if isinstance(thing, partial):
            thing = thing.func
        elif isinstance(thing, MethodType):
            thing = thing.__self__
        elif type(thing) is Subset:
            thing = thing.dataset
        else:
            break
    return thing


def makers_of(loader: object, prefix: str = "") -> dict[str, object]:
    """The dataset and collate_fn of a loader, where they run in this process."""
    if not isinstance(loader, DataLoader) or loader.num_workers:
        return {}
    makers: dict[str, object] = {f"{prefix}dataset": loader.dataset}
    if loader.collate_fn not in (default_collate, default_convert):
        makers[f"{prefix}collate_fn"] = loader.collate_fn
    return makers


def check_loader(loader: object, name: str = "the loader") -> None:
    """Refuse a dataset in place of a loader, and what cannot be iterated."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise BadArgument(
            f"{name} is {an(type(loader).__name__)}, which gives no batches",
            fix="give a loader: DataLoader(dataset, batch_size=32, shuffle=True)",
        )
    if isinstance(loader, IterableDataset):
        raise BadArgument(
            f"{name} is {an(type(loader).__name__)}, an IterableDataset: each of its items would count as a batch",
            fix="give it to a loader: DataLoader(dataset, batch_size=32), or where its items are whole batches"
            " DataLoader(dataset, batch_size=None)",
        )
    if isinstance(loader, Dataset):
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
