"""Where batches come from, and what they look like."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import hotloop

from .style import Pair, adamw, loader, mlp, pairs, sgd, style, update


def classifying(data: object, epochs: int = 2) -> Pair:
    """A classifier of the batches `(x, y)` of some loader, and the tutorial's loop."""
    model = mlp()
    optimizer, criterion = sgd(model), nn.CrossEntropyLoss()

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(data, epochs=epochs)

    def twin():
        for _ in range(epochs):
            for x, y in data:
                update(optimizer, criterion(model(x), y))

    return ours, twin, (model, optimizer)


@style
def data_loader() -> Pair:
    """In an order of its own in every epoch, with a last batch that is shorter."""
    return classifying(loader(rows=21), epochs=3)


@style
def list_of_batches() -> Pair:
    return classifying(pairs())


@style
def dataset_of_ones_own() -> Pair:
    """Items are made when they are asked for, with noise."""

    class Noisy(Dataset):
        def __init__(self):
            self.x = torch.randn(20, 3)

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return self.x[index] + 0.1 * torch.randn(3), int(self.x[index].sum() > 0)

    return classifying(DataLoader(Noisy(), 8, shuffle=True, drop_last=True))


@style
def iterable_dataset() -> Pair:
    """A stream of items that has no length."""

    class Items(IterableDataset):
        def __iter__(self):
            for _ in range(18):
                x = torch.randn(3)
                yield x, (x.sum() > 0).long()

    return classifying(DataLoader(Items(), 8))


@style
def generator_of_batches() -> Pair:
    """A generator is read once; each epoch of an own loop makes another."""
    model = mlp()
    optimizer, criterion = sgd(model), nn.CrossEntropyLoss()

    def batches():
        for _ in range(3):
            x = torch.randn(4, 3)
            yield x, (x.sum(1) > 0).long()

    def ours():
        loop = hotloop.Loop(model, optimizer, criterion)
        for _ in range(2):
            for batch in loop.batches(batches()):
                loop.step(batch)

    def twin():
        for _ in range(2):
            for x, y in batches():
                update(optimizer, criterion(model(x), y))

    return ours, twin, model


@style
def generator_for_one_epoch() -> Pair:
    """`fit` takes a generator too, for as long as it lasts."""
    model, seen = mlp(), pairs()
    optimizer, criterion = sgd(model), nn.CrossEntropyLoss()

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(batch for batch in seen)

    def twin():
        for x, y in seen:
            update(optimizer, criterion(model(x), y))

    return ours, twin, model


@style
def loader_of_ones_own() -> Pair:
    """Anything that can be iterated again."""

    class Loader:
        def __init__(self):
            self.x = torch.randn(20, 3)

        def __iter__(self):
            for rows in torch.randperm(20).split(6):
                yield self.x[rows], (self.x[rows].sum(1) > 0).long()

    return classifying(Loader())


@style
def dicts() -> Pair:
    """Dicts and an objective that knows their keys."""
    model, batches = mlp(), [{"x": x, "y": y, "name": ["a"] * len(x)} for x, y in pairs()]
    optimizer = adamw(model)

    def ours():
        objective = lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])  # noqa: E731
        hotloop.Loop(model, optimizer, objective=objective).fit(batches)

    def twin():
        for batch in batches:
            update(optimizer, F.cross_entropy(model(batch["x"]), batch["y"]))

    return ours, twin, model


class Example(NamedTuple):
    x: Tensor
    y: Tensor


@style
def namedtuples() -> Pair:
    """Namedtuples that the DataLoader's own collate keeps, in the order `(input, target)`."""
    items = [Example(x, (x.sum() > 0).long()) for x in torch.randn(20, 3)]
    return classifying(DataLoader(items, 8, shuffle=True))


class Graph:
    """A batch of a library's own class, which knows how it is moved."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device, non_blocking=False):
        return Graph(self.x.to(device, non_blocking=non_blocking), self.y.to(device, non_blocking=non_blocking))


@style
def objects_with_to() -> Pair:
    """Batches with `.to(device)`, as those of graph libraries."""
    model, batches = mlp(), [Graph(x, y) for x, y in pairs()]
    optimizer = adamw(model)

    def ours():
        objective = lambda model, batch: F.cross_entropy(model(batch.x), batch.y)  # noqa: E731
        hotloop.Loop(model, optimizer, objective=objective).fit(batches)

    def twin():
        for batch in batches:
            update(optimizer, F.cross_entropy(model(batch.x), batch.y))

    return ours, twin, model


@style
def ragged_lists() -> Pair:
    """Lists of tensors of many sizes, which an own collate leaves apart."""
    model = mlp()
    items = [(torch.randn(length, 3), length % 2) for length in (1, 4, 2, 3, 5, 2, 6, 1)]
    optimizer = adamw(model)

    def collate(items):
        clouds, labels = zip(*items, strict=True)
        return list(clouds), torch.tensor(labels)

    data = DataLoader(items, 4, shuffle=True, collate_fn=collate)

    def objective(model, batch):
        clouds, labels = batch
        return F.cross_entropy(torch.stack([model(cloud).mean(0) for cloud in clouds]), labels)

    def ours():
        hotloop.Loop(model, optimizer, objective=objective).fit(data, epochs=2)

    def twin():
        for _ in range(2):
            for batch in data:
                update(optimizer, objective(model, batch))

    return ours, twin, model


@style
def mixup_in_collate() -> Pair:
    """Pairs of items are mixed, and so are their labels."""

    def mixed(items):
        x, y = default_collate(items)
        share, order = torch.rand(()), torch.randperm(len(x))
        y = F.one_hot(y, 2).float()
        return torch.lerp(x, x[order], share), torch.lerp(y, y[order], share)

    return classifying(loader(collate_fn=mixed))


@style
def weighted_sampler() -> Pair:
    """Rare classes are drawn as often as others."""
    x = torch.randn(20, 3)
    y = (x.sum(1) > 1).long()
    sampler = WeightedRandomSampler(1 / y.bincount()[y], num_samples=18)
    return classifying(DataLoader(TensorDataset(x, y), 6, sampler=sampler))


@style
def batch_sampler() -> Pair:
    """A sampler that gives whole batches, each of a kind."""

    class ByLength(Sampler):
        def __iter__(self):
            for start in torch.randperm(4).tolist():
                yield range(start, 20, 4)

        def __len__(self):
            return 4

    x = torch.randn(20, 3)
    return classifying(DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_sampler=ByLength()))


@style
def mixed_datasets() -> Pair:
    """Two datasets one after the other, shuffled together."""
    parts = [TensorDataset(torch.randn(n, 3) + n / 9, torch.full((n,), n % 2)) for n in (9, 12)]
    return classifying(DataLoader(ConcatDataset(parts), 6, shuffle=True))


@style
def labelled_and_unlabelled() -> Pair:
    """Two loaders side by side: the second is longer, and an epoch is one of the first."""
    model = mlp()
    labelled, unlabelled = loader(rows=12, size=4), loader(rows=40, size=8)
    optimizer = adamw(model)

    class Both:
        def __len__(self):
            return len(labelled)

        def __iter__(self):
            return zip(labelled, unlabelled, strict=False)

    def objective(model, batch):
        (x, y), (more, _) = batch
        near = F.mse_loss(model(more + 0.1 * torch.randn_like(more)), model(more).detach())
        return {"labels": F.cross_entropy(model(x), y), "consistency": near}

    def ours():
        hotloop.Loop(model, optimizer, objective=objective).fit(Both(), epochs=2)

    def twin():
        for _ in range(2):
            for batch in zip(labelled, unlabelled, strict=False):
                update(optimizer, sum(objective(model, batch).values()))

    return ours, twin, model


@style
def augmentation_on_the_device() -> Pair:
    """Whole batches are changed after they were moved."""
    model, data = mlp(), loader()
    optimizer, criterion = adamw(model), nn.CrossEntropyLoss()

    def augment(batch):
        x, y = batch
        return x + 0.1 * torch.randn_like(x), y

    def ours():
        hotloop.Loop(model, optimizer, criterion).fit(data, epochs=2, device_transform=augment)

    def twin():
        for _ in range(2):
            for batch in data:
                x, y = augment(batch)
                update(optimizer, criterion(model(x), y))

    return ours, twin, model


@style
def leave_one_fold_out() -> Pair:
    """Cross-validation: a model, an optimizer and a loop for every fold."""
    folds = pairs(15)
    models = [mlp() for _ in folds]
    criterion = nn.CrossEntropyLoss()

    def ours():
        for number, model in enumerate(models):
            rest = folds[:number] + folds[number + 1 :]
            hotloop.Loop(model, sgd(model), criterion).fit(rest, validate=[folds[number]])

    def twin():
        for number, model in enumerate(models):
            optimizer = sgd(model)
            for x, y in folds[:number] + folds[number + 1 :]:
                update(optimizer, criterion(model(x), y))

    return ours, twin, models
