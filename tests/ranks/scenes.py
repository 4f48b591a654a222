"""Trainings that are run alone and on several ranks with the same global batch: `scenes.py FOLDER [NAME …]`.

Each writes its weights, the losses of its epochs and the metrics of its evaluations; every rank writes its own. With
SCENE_BACKEND the script makes the process group itself, of one rank too.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hotloop

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
DEVICE = os.environ.get("SCENE_DEVICE", "cpu")  # of all ranks: a GPU is shared
BACKEND = os.environ.get("SCENE_BACKEND", "")
IN_GROUP = RANKS > 1 or bool(BACKEND)
GLOBAL = 16  # items of a step, on all ranks together
ROWS = 71  # which divides by nothing, and makes an odd number of batches of an evaluation


def rows(classes: int = 5, items: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(items, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) * 7).long() % classes)


def loader(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, GLOBAL // RANKS, shuffle=True, **options)


def network(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), *(layers or (nn.Tanh(),)), nn.Linear(12, 5))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return output.argmax(1) == target


def trained(model: nn.Module, criterion: Any, data: Any, *, epochs: int = 3, **options: Any) -> Any:
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), 1e-2)
    named = ("validate", "metrics", "best", "restore_best", "on_epoch", "save")
    fit = {name: options.pop(name) for name in named if name in options}
    loop = hotloop.Loop(model, optimizer, criterion, device=DEVICE, plan=options.pop("plan", "plain"), **options)
    return loop, loop.fit(data, epochs=epochs, progress=False, monitor=False, **fit)


def plain() -> Any:
    """N does not divide by ranks × batch; validation of every sample exactly once."""
    return trained(
        network(),
        nn.CrossEntropyLoss(),
        loader(rows()),
        validate=DataLoader(rows(), 7),
        metrics={"accuracy": accuracy},
        train_metrics={"accuracy": accuracy},
    )


def accumulated() -> Any:
    """Windows of 3 batches, of which the end of an epoch cuts one short; clipping, a scheduler."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return trained(
        model,
        nn.CrossEntropyLoss(),
        loader(rows()),
        optimizer=optimizer,
        scheduler=scheduler,
        accumulate=3,
        clip_norm=0.5,
    )


def ignored() -> Any:
    """Labels of which an uneven part is ignored: what a loss is the mean over differs from rank to rank."""
    x, y = rows().tensors
    y = torch.where(torch.arange(len(y)) % 7 < 3, -100, y)
    return trained(network(), nn.CrossEntropyLoss(ignore_index=-100), loader(TensorDataset(x, y)))


def ignored_and_accumulated() -> Any:
    x, y = rows().tensors
    y = torch.where(torch.arange(len(y)) % 7 < 3, -100, y)
    data = loader(TensorDataset(x, y))
    return trained(network(), nn.CrossEntropyLoss(ignore_index=-100), data, accumulate=2)


def picked() -> Any:
    """Batches of one size whose losses are means over different numbers of items, which the host knows."""
    data = TensorDataset(*rows().tensors, torch.arange(ROWS) % 7 < 5)

    def objective(model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")[batch[2]].mean()

    return trained(network(), None, loader(data), objective=objective)


def counted() -> Any:
    """The same, and the objective says the number."""
    data = TensorDataset(*rows().tensors, torch.arange(ROWS) % 7 < 5)

    def objective(model: Any, batch: Any) -> tuple[Tensor, int]:
        x, y, mask = batch
        return nn.functional.cross_entropy(model(x[mask]), y[mask]), int(mask.sum())

    return trained(network(), None, loader(data), objective=objective)


def summed() -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return trained(model, nn.CrossEntropyLoss(reduction="sum"), loader(rows()), optimizer=optimizer)


def cut() -> Any:
    """Micro-batches that a function of the person's cuts, which is another object on each rank."""

    def rows_of(batch: Any, start: int, stop: int) -> Any:
        return tuple(each[start:stop] for each in batch)

    return trained(network(), nn.CrossEntropyLoss(), loader(rows()), micro_batch=3, split=rows_of)


def few() -> Any:
    """Fewer rows than a step takes: on some ranks every batch counts for nothing."""
    validate = DataLoader(rows(items=5), 8)  # one batch, which only one rank sees
    return trained(
        network(), nn.CrossEntropyLoss(), loader(rows(items=5)), validate=validate, metrics={"accuracy": accuracy}
    )


def dropped() -> Any:
    return trained(network(), nn.CrossEntropyLoss(), loader(rows(), drop_last=True))


def workers() -> Any:
    return trained(network(), nn.CrossEntropyLoss(), loader(rows(), num_workers=1), epochs=2)


class Endless(IterableDataset[Any]):
    """Batches without a length."""

    def __iter__(self) -> Iterator[Any]:
        x, y = rows().tensors
        yield from zip(x.split(GLOBAL // RANKS), y.split(GLOBAL // RANKS), strict=True)


def iterable() -> Any:
    return trained(network(), nn.CrossEntropyLoss(), DataLoader(Endless(), batch_size=None))


def unused() -> Any:
    """A layer that takes part in no step, and one that does in the first epoch only on some."""
    model = network()
    model.spare = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def objective(model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model[2](model[1](model[0](batch[0]))), batch[1])

    loop = hotloop.Loop(model, optimizer, objective=objective, device=DEVICE, plan="plain")
    return loop, loop.fit(loader(rows()), epochs=2, progress=False, monitor=False)


def unused_and_zero() -> Any:
    """A layer that has a gradient of zeros on one rank and none on the other: all of them decay its weights."""
    model = network()
    model.spare = nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.5)
    first = rows()[0][0].to(DEVICE)

    def objective(model: Any, batch: Any) -> Tensor:
        output = model[2](model[1](model[0](batch[0])))
        if (batch[0] == first).all(1).any():
            output = output + 0 * model.spare(batch[0])
        return nn.functional.cross_entropy(output, batch[1])

    return trained(model, None, loader(rows(items=GLOBAL)), optimizer=optimizer, objective=objective)


def besides() -> Any:
    """Parameters of a criterion, which the model does not have."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((5,), 1.0 + RANK))  # that of rank 0 is that of all

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(output * self.scale, target)

    model, criterion = network(), Scaled()
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], 1e-2)
    loop, report = trained(model, criterion, loader(rows()), optimizer=optimizer)
    model.register_buffer("scale", criterion.scale.detach().clone())  # to be compared with the weights
    return loop, report


def thawed() -> Any:
    """The first layer is trained from the second epoch on, and the last one no longer from the third."""
    model = network()
    model[0].requires_grad_(False)

    def on_epoch(record: Any) -> None:
        model[0].requires_grad_(True)
        model[2].requires_grad_(record.epoch.number < 2)

    return trained(model, nn.CrossEntropyLoss(), loader(rows()), epochs=4, on_epoch=on_epoch)


def two_objectives(epochs: int = 2, plan: Any = "plain") -> Any:
    """As in a GAN: each objective has its own weights, and neither sends gradients of the other's."""
    model = nn.ModuleDict({"g": nn.Linear(6, 6), "d": nn.Linear(6, 1)})
    optimizers = {"d": torch.optim.Adam(model["d"].parameters()), "g": torch.optim.Adam(model["g"].parameters())}

    def d(model: Any, batch: Any) -> Tensor:
        return model["d"](model["g"](batch[0]).detach()).sigmoid().mean() - model["d"](batch[0]).sigmoid().mean()

    def g(model: Any, batch: Any) -> Tensor:
        return -model["d"](model["g"](batch[0])).sigmoid().mean()

    loop = hotloop.Loop(model, optimizers, objective={"d": d, "g": g}, device=DEVICE, plan=plan)
    return loop, loop.fit(loader(rows()), epochs=epochs, progress=False, monitor=False)


def tuned() -> Any:
    """A run that is left to the tuner and long enough for a plan: all ranks adopt the same one, after the same step."""
    return trained(network(), nn.CrossEntropyLoss(), loader(rows(items=1605)), epochs=2, plan="auto")


class Block(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def blocks() -> nn.Module:
    """A model with blocks that repeat, as FSDP shards them."""
    return nn.Sequential(nn.Linear(6, 12), nn.Sequential(Block(), Block(), Block()), nn.Linear(12, 5))


def sharded() -> Any:
    """FSDP, where there is a process group: uneven data, ignored labels, accumulation, clipping, a scheduler."""
    x, y = rows().tensors
    y = torch.where(torch.arange(len(y)) % 7 < 3, -100, y)
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return trained(
        model,
        nn.CrossEntropyLoss(ignore_index=-100),
        loader(TensorDataset(x, y)),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        validate=DataLoader(rows(), 7),
        metrics={"accuracy": accuracy},
        plan=hotloop.Plan(DEVICE, accumulate=2, clip_norm=0.5, parallel="fsdp" if IN_GROUP else "ddp"),
    )


def sharded_and_checkpointed() -> Any:
    plan = hotloop.Plan(DEVICE, checkpointing=True, fused=True, parallel="fsdp" if IN_GROUP else "ddp")
    return trained(blocks(), nn.CrossEntropyLoss(), loader(rows()), plan=plan)


def best() -> Any:
    """FSDP, where there is a process group: the weights of the best epoch, which ranks keep without a gather."""
    epochs: list[int] = []

    def accuracy(output: Tensor, target: Tensor) -> Tensor:
        return torch.full((len(output),), (0.5, 0.9, 0.7)[len(epochs)])

    plan = hotloop.Plan(DEVICE, parallel="fsdp" if IN_GROUP else "ddp")
    gathered, full_tensor = [], DTensor.full_tensor
    DTensor.full_tensor = lambda *args, **options: gathered.append(1) or full_tensor(*args, **options)
    try:
        return trained(
            blocks(),
            nn.CrossEntropyLoss(),
            loader(rows()),
            plan=plan,
            validate=DataLoader(rows(), 7),
            metrics={"accuracy": accuracy},
            best="accuracy",
            restore_best=True,
            on_epoch=lambda record: epochs.append(record.epoch.number) and None,
        )
    finally:
        DTensor.full_tensor = full_tensor
        assert not gathered


def normalised() -> Any:
    """`SyncBatchNorm`, where there is a process group."""
    # Without a bias before the normalisation: its gradient is rounding noise, of which AdamW makes whole steps.
    model = nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 5))
    plan = hotloop.Plan(DEVICE, sync_batchnorm=IN_GROUP)
    return trained(model, nn.CrossEntropyLoss(), loader(rows()), validate=DataLoader(rows(), 7), plan=plan)


SCENES: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        plain,
        accumulated,
        ignored,
        ignored_and_accumulated,
        picked,
        counted,
        summed,
        cut,
        few,
        dropped,
        workers,
        iterable,
        unused,
        unused_and_zero,
        besides,
        thawed,
        two_objectives,
        tuned,
        sharded,
        sharded_and_checkpointed,
        best,
    )
}
ON_GPUS: dict[str, Callable[[], Any]] = {"normalised": normalised}


def main() -> None:
    folder, *names = sys.argv[1:]
    if BACKEND:
        dist.init_process_group(BACKEND)
    for name in names or SCENES:
        torch.manual_seed(0 if RANKS == 1 else 10 * RANK)  # the weights and the order of rank 0 are those of all
        loop, report = {**SCENES, **ON_GPUS}[name]()
        assert bool(report.by_rank) == IN_GROUP
        where = Path(folder, f"{name} {RANKS}{BACKEND} {RANK}")
        weights = {key: value.cpu() for key, value in loop.state_dict()["model"].items()}
        torch.save(weights, where.with_suffix(".pt"))
        epochs = [
            {"loss": epoch.loss, "items": epoch.items, **epoch.metrics}
            | {f"training {name}": value for name, value in epoch.train_metrics.items()}
            for epoch in report.epochs
        ]
        plans = [[change.batch, change.plan] for change in report.plans]
        where.with_suffix(".json").write_text(json.dumps({"epochs": epochs, "steps": report.steps, "plans": plans}))
    if BACKEND:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
