"""Where the order of a loader comes from: its samplers and their generators."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

KNOWN = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_DEEPEST = 8  # samplers within samplers


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
