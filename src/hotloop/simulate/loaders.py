"""The `DataLoader`s that a script learns from: their batches are counted, set, and full."""

import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from hotloop.simulate._torch import fetchers
from hotloop.simulate.patches import Patches
from hotloop.simulate.places import here

if TYPE_CHECKING:
    from hotloop.simulate.batches import Batches

PATIENCE = 64  # batches without a step after which an epoch may end


class Loaders:
    """Loaders that are read where gradients are on; those of an evaluation stay as they are."""

    def __init__(self, batches: "Batches") -> None:
        self.samples = 0  # that the last step learnt from
        self.items: int | None = None  # of data that has less than a batch, and was gone through again for it
        self._batches = batches
        self._counted = self._drawn = 0  # samples and batches since the last step
        self._full: weakref.WeakSet[Any] = weakref.WeakSet()  # samplers that are to give full batches
        self._lines: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # where loaders were made

    def install(self, patches: Patches) -> None:
        make, begin, draw = DataLoader.__init__, DataLoader.__iter__, BatchSampler.__iter__

        def made(loader: Any, *args: Any, **kwargs: Any) -> None:
            place = here()
            self._lines[loader] = place.line if place else 0
            make(loader, *args, **kwargs)

        def began(loader: Any) -> Any:
            if torch.is_grad_enabled():
                self._learns_from(loader)
            return begin(loader)

        def drawn(sampler: Any) -> Iterator[list[int]]:
            return self._full_batches(sampler) if sampler in self._full else draw(sampler)

        patches.set(DataLoader, "__init__", made)
        patches.set(DataLoader, "__iter__", began)
        patches.set(BatchSampler, "__iter__", drawn)
        for fetcher, count in zip(fetchers(), (_length, _leading), strict=False):
            patches.set(fetcher, "fetch", self._counting(fetcher.fetch, count))

    def stepped(self) -> None:
        self.samples = self._counted
        self._counted = self._drawn = 0

    def _learns_from(self, loader: Any) -> None:
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if not isinstance(sampler, BatchSampler) or sampler in self._full:
            return
        line = self._lines.get(loader, 0)
        if self._batches.looks("loader", str(line)) and not self._said(sampler.batch_size):
            self._found(loader, sampler, line)
        if self._batches.size is not None and type(sampler).__iter__ is BatchSampler.__iter__:
            self._full.add(sampler)

    def _said(self, size: int) -> bool:
        """Whether the batch was set elsewhere, and this is what came of it."""
        batches = self._batches
        options = any(place.startswith(("argument:", "environment:")) for place in batches.set)
        return batches.way is None and (options or (size == batches.size and bool(batches.set)))

    def _found(self, loader: Any, sampler: BatchSampler, line: int) -> None:
        own, place = sampler.batch_size, f"loader:{line}"
        others = {other: size for other, size in self._batches.found.items() if other.startswith("loader:")}
        if any(size != own for size in others.values()) and place not in others:
            self._batches.disagree("loader", {**others, place: own})
        elif self._batches.notice(place, others.get(place, own)) and self._batches.size is not None:
            sampler.batch_size = self._batches.size
            loader.__dict__["batch_size"] = self._batches.size  # which cannot be set as attributes are
            self._batches.set[:] = [other for other in self._batches.set if other.startswith("loader:")]

    def _full_batches(self, sampler: Any) -> Iterator[list[int]]:
        """Full ones as long as they are learnt from, since memory is that of a full batch.

        Data that has less than a batch is gone through again, and an epoch goes on. Where nothing learns from it, it
        ends as it would.
        """
        items, first = iter(sampler.sampler), True
        while True:
            batch = list(islice(items, sampler.batch_size))
            missing = sampler.batch_size - len(batch)
            if missing and first:
                self.items = len(batch)
            if missing and (first or self._learning):
                items = _again(sampler.sampler)
                batch += islice(items, missing)
            if len(batch) < (sampler.batch_size if sampler.drop_last else 1):
                return
            first = False
            yield batch

    @property
    def _learning(self) -> bool:
        return self._drawn <= PATIENCE and bool(self._batches.work or self._batches.made)

    def _counting(self, get: Callable[..., Any], count: Callable[[Any, Any], int]) -> Callable[..., Any]:
        def counted(fetcher: Any, index: Any) -> Any:
            data = get(fetcher, index)
            if torch.is_grad_enabled():
                self._drawn += 1
                self._counted += count(index, data)
            return data

        return counted


def _again(sampler: Any) -> Iterator[int]:
    """What a sampler gives, over and over; nothing where it gives nothing."""
    while True:
        some = False
        for item in sampler:
            some = True
            yield item
        if not some:
            return


def _length(index: Any, _data: Any) -> int:
    return len(index) if isinstance(index, list | tuple) else 1


def _leading(_index: Any, data: Any) -> int:
    """The first dimension of the first tensor of a batch."""
    if isinstance(data, Tensor):
        return len(data) if data.dim() else 1
    values = data.values() if hasattr(data, "values") else data if isinstance(data, list | tuple) else ()
    return next((found for value in values if (found := _leading(None, value))), 0)
