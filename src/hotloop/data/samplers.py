"""Where the order of a loader comes from, and how its batches are dealt out to the ranks of a run, each exactly once.

The order of `shared` is that of the loader in a single process: of every `size` batches in a row, which together are
the batch of one step, each rank has one. Where the last of them are missing, a rank trains on a batch that counts for
nothing, since all ranks take part in every update.
"""

import math
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hotloop.data.origin import BatchOrigin, twin
from hotloop.ranks.group import Ranks

_DEEPEST = 8  # samplers within samplers


class Dealt:
    """Batches, or their indices, of which each rank of a run keeps its own: one of every `size` in a row."""

    def __init__(self, every: Any, ranks: Ranks, *, fills: bool, drop_last: bool = False) -> None:
        self.fillers: set[int] = set()  # numbers of batches of this epoch that count for nothing on this rank
        self.fills = fills  # whether each rank gets as many as the others
        self._every, self._ranks, self._drop_last = every, ranks, drop_last

    def __iter__(self) -> Iterator[Any]:
        self.fillers.clear()
        return self._kept(iter(self._every))

    def _kept(self, every: Iterator[Any]) -> Iterator[Any]:
        rank, size, number = self._ranks.rank, self._ranks.size, 0
        while together := list(islice(every, size)):
            if len(together) < size and self._drop_last:
                return
            if rank < len(together):
                yield together[rank]
            elif self.fills:
                self.fillers.add(number)
                yield together[0]
            number += 1

    def __len__(self) -> int:
        batches, size = len(self._every), self._ranks.size
        if self._drop_last:
            return batches // size
        return math.ceil(batches / size) if self.fills else math.ceil(max(batches - self._ranks.rank, 0) / size)


class RankBatches(Dealt):
    """The sampler of a loader whose batches are dealt out to ranks."""

    def __init__(self, sampler: Any, ranks: Ranks, *, fills: bool, drop_last: bool = False) -> None:
        super().__init__(sampler, ranks, fills=fills, drop_last=drop_last)
        self.sampler = sampler

    @property
    def even(self) -> int:
        """Steps of an epoch in which all ranks have batches of the same size; 0 where that is not known."""
        batches = self.sampler
        if type(batches) is not BatchSampler or not isinstance(batches.sampler, Sized):
            return 0
        return len(batches.sampler) // batches.batch_size // self._ranks.size


KNOWN = (RankBatches, BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def index_sampler(loader: DataLoader[Any]) -> Any:
    """What a loader asks for the indices of each batch."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def samplers_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """The sampler that a loader asks, the one which that asks in turn, and so on."""
    sampler = index_sampler(loader)
    for _ in range(_DEEPEST):
        if sampler is None:
            return
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def has_known_sampler(loader: object) -> bool:
    """Whether a loader's order comes from samplers of PyTorch whose only state is that of their generators."""
    return type(loader) is DataLoader and all(type(sampler) in KNOWN for sampler in samplers_of(loader))


def generators_of(loader: object) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, besides the global one."""
    if not isinstance(loader, DataLoader):
        return []
    held = [loader, *samplers_of(loader)]
    return [g for each in held if isinstance(g := getattr(each, "generator", None), torch.Generator)]


def draw_base_seed(loader: DataLoader[Any]) -> int:
    """Draw the seed that a DataLoader draws for its workers when it begins an epoch."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())


class RankItems(Dealt):
    """What can be iterated and is no DataLoader over indices: each rank reads all of it and keeps its batches."""


def shared(loader: Any, ranks: Ranks, *, fills: bool = True) -> Any:
    """The batches of a loader that are those of this rank; `fills`: every rank gets as many as the others.

    A loader with a `DistributedSampler` deals out by itself, and so does a dataset with `is_sharded = True`.
    """
    if is_shared(loader):
        return loader
    if type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset):
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        drop_last = bool(getattr(loader.batch_sampler, "drop_last", False)) and fills
        dealt = RankBatches(getattr(loader, name), ranks, fills=fills, drop_last=drop_last)
        return twin(loader, **{name: dealt})
    return RankItems(loader, ranks, fills=fills)


def is_shared(loader: Any) -> bool:
    """Whether a loader gives each rank other items already."""
    if isinstance(loader, RankItems) or getattr(getattr(loader, "dataset", None), "is_sharded", False):
        return True
    return isinstance(loader, DataLoader) and any(
        isinstance(sampler, DistributedSampler | RankBatches) for sampler in samplers_of(loader)
    )


def is_filler(loader: Any, origin: BatchOrigin | None) -> bool:
    """Whether a batch counts for nothing on this rank."""
    dealt = _dealt(loader)
    return origin is not None and dealt is not None and origin.number in dealt.fillers


def may_be_empty(loader: Any) -> bool:
    """Whether a loader was dealt out to more ranks than it has batches, so that this one may have none."""
    dealt = _dealt(loader)
    return dealt is not None and not dealt.fills


def _dealt(loader: Any) -> Dealt | None:
    dealt = loader if isinstance(loader, RankItems) else index_sampler(loader) if type(loader) is DataLoader else None
    return dealt if isinstance(dealt, Dealt) else None


def is_even(loader: Any, origin: BatchOrigin | None) -> bool:
    """Whether all ranks are known to have batches of one size in this step."""
    sampler = getattr(loader, "batch_sampler", None)
    return origin is not None and isinstance(sampler, RankBatches) and origin.number < sampler.even
