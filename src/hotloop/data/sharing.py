"""`shared`: the batches of a loader dealt out to the ranks of a run, each exactly once.

The order is that of the loader in a single process: of every `size` batches in a row, which together are the batch of
one step, each rank has one. Where the last of them are missing, a rank trains on a batch that counts for nothing, since
all ranks take part in every update.
"""

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from hotloop.data.origin import BatchOrigin, twin
from hotloop.data.samplers import Dealt, RankBatches, index_sampler, samplers_of
from hotloop.ranks.group import Ranks


class RankItems(Dealt):
    """What can be iterated and is no DataLoader over indices: each rank reads all of it and keeps its batches."""

    def __init__(self, loader: Iterable[Any], ranks: Ranks, *, fills: bool) -> None:
        super().__init__(loader, ranks, fills=fills)
        self.loader = loader


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
