"""Where a batch comes from, twins of loaders, and what is no loader."""

import copy
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import index
from types import MethodType
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate, default_convert

from hotloop.errors import BadArgument, EmptyLoader
from hotloop.printing.text import an, plural
from hotloop.values.tree import tensors_in

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
                floats = [tensor for _, tensor in tensors_in(self.dataset[i]) if tensor.is_floating_point()]
                if not all(bool(tensor.isfinite().all()) for tensor in floats):
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


def twin(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """A shallow copy of a loader with some attributes changed and workers of its own."""
    clone = copy.copy(loader)
    # Past __setattr__, which guards the loader that a person holds; this one is ours.
    clone.__dict__.update(changed, _iterator=None)
    return clone


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
