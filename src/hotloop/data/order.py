"""The order of a DataLoader as whole tensors: what its sampler would draw one number at a time, drawn at once."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from hotloop.data.origin import twin
from hotloop.data.samplers import draw_base_seed

SPLIT = 1024  # batches at a time: the first of a long epoch do not wait for the last


def can_draw_at_once(loader: DataLoader[Any]) -> bool:
    """Whether a loader shuffles as most do, each item once, and this PyTorch draws the order as it is drawn here."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or type(batches.sampler) is not RandomSampler:
        return False
    sampler = batches.sampler
    each_once = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return each_once and _is_as_pytorch_draws(seeded=sampler.generator is not None, drop_last=batches.drop_last)


def draws_at_once(loader: DataLoader[Any], *, seeds_workers: bool) -> Iterator[Tensor]:
    """The indices of each batch; rng states are used as the loader would use them."""
    batches = loader.batch_sampler
    assert isinstance(batches, BatchSampler)
    if seeds_workers:
        draw_base_seed(loader)
    return _batches(batches.sampler, batches.batch_size, batches.drop_last)  # type: ignore[arg-type]


def _batches(sampler: RandomSampler, size: int, drop_last: bool) -> Iterator[Tensor]:
    items = len(sampler.data_source)
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    order = torch.randperm(items, generator=generator)
    full = items - items % size  # in whole batches
    for some in order[:full].split(size * SPLIT) if full else ():
        yield from some.split(size)
    if sampler.generator is not None:
        torch.randperm(items, generator=generator)  # the sampler begins another round, of which it needs nothing
    if full < items and not drop_last:
        yield order[full:]


@cache
def _is_as_pytorch_draws(*, seeded: bool, drop_last: bool) -> bool:
    """Compare with PyTorch's own machinery, once for a kind of loader: a later version may draw differently."""
    before, seen = torch.get_rng_state(), []
    try:
        for ours in (False, True):
            torch.default_generator.manual_seed(5)  # that of the host alone
            generator = torch.Generator().manual_seed(7) if seeded else None
            data = TensorDataset(torch.arange(11))
            loader = DataLoader(data, 4, shuffle=True, drop_last=drop_last, generator=generator)
            order: list[Any] = []
            for _ in range(2):
                if ours:
                    order += [rows.tolist() for rows in draws_at_once(loader, seeds_workers=True)]
                else:
                    order += [batch.tolist() for (batch,) in twin(loader)]
            order.append(torch.get_rng_state().tolist())
            order.append(generator.get_state().tolist() if generator is not None else None)
            seen.append(order)
    finally:
        torch.set_rng_state(before)
    return seen[0] == seen[1]
