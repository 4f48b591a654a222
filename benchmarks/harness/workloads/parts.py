"""What a workload is: its data, network, objectives and optimizers in one size, and new parts of it for each loop."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from hotloop.errors import BadArgument

Criterion = Callable[[Any, Any], Tensor]
Objective = Callable[[Any, Any], Tensor]
Transform = Callable[[Any], Any]


@dataclass(frozen=True)
class TrainingParts:
    """What one contestant trains; every contestant gets its own, and all are equal."""

    workload: str
    model: nn.Module
    optimizer: Optimizer | Mapping[str, Optimizer]  # several by the name of their objective
    loader: DataLoader[Any]
    loss: Criterion | None
    objective: Objective | Mapping[str, Objective] | None
    optimize: Callable[..., Optimizer]  # the same optimizer for whoever builds it with switches of their own
    device_transform: Transform | None = None  # changes a batch that is on the device

    def compute(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, as the loop of a tutorial would write it."""
        if isinstance(self.objective, Mapping):
            raise BadArgument(f"{self.workload} has several objectives", fix="go through `updates`")
        if self.objective is not None:
            return self.objective(model, batch)
        if self.loss is not None:
            inputs, targets = batch
            return self.loss(model(inputs), targets)
        loss: Tensor = model(**batch).loss
        return loss

    @property
    def updates(self) -> tuple[tuple[Objective, Optimizer], ...]:
        """The updates that a batch brings: each objective with its optimizer, in order."""
        if isinstance(self.objective, Mapping):
            assert isinstance(self.optimizer, Mapping)
            return tuple((objective, self.optimizer[name]) for name, objective in self.objective.items())
        return ((self.compute, self.only_optimizer),)

    @property
    def only_optimizer(self) -> Optimizer:
        """The optimizer, for loops that know but one."""
        if isinstance(self.optimizer, Mapping):
            raise BadArgument(f"{self.workload} has several optimizers, and this loop has one", fix="leave it out")
        return self.optimizer

    def transformed(self, batch: Any) -> Any:
        """A batch on the device as the objective gets it."""
        return batch if self.device_transform is None else self.device_transform(batch)


@dataclass(frozen=True)
class Workload:
    """Something to train, in one size."""

    name: str
    unit: str
    dataset: Dataset[Any]
    items: int
    batch: int
    network: Callable[[], nn.Module]
    optimize: Callable[..., Optimizer]
    loss: Criterion | None = None
    objective: Objective | Mapping[str, Objective] | None = None  # one of several trains the submodule of its name
    units_per_item: int = 1
    epochs: int = 1  # in a repeat
    workers: int = 0
    pinned: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    device_transform: Transform | None = None
    seed: int = 0
    note: str = ""  # how it differs from the full size

    @property
    def units(self) -> int:
        """What an epoch holds, in `unit`."""
        return self.items * self.units_per_item

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return math.ceil(self.items / self.batch)

    def parts(self) -> TrainingParts:
        """A new model, optimizer and loader, equal each time. Sets torch's seed, from which a training goes on."""
        torch.manual_seed(self.seed)
        model = self.network()
        loader = DataLoader(
            self.dataset,
            self.batch,
            shuffle=True,
            num_workers=self.workers,
            collate_fn=self.collate,
            pin_memory=self.pinned,
            generator=torch.Generator().manual_seed(self.seed),
        )
        optimizer: Optimizer | dict[str, Optimizer]
        if isinstance(self.objective, Mapping):
            optimizer = {name: self.optimize(model.get_submodule(name).parameters()) for name in self.objective}
        else:
            optimizer = self.optimize(model.parameters())
        return TrainingParts(
            self.name, model, optimizer, loader, self.loss, self.objective, self.optimize, self.device_transform
        )


@dataclass(frozen=True)
class Scale:
    """Where a workload runs, and so which of its sizes suits."""

    device: torch.device
    quick: bool = False
    seed: int = 0

    def pick(self, full: int, cpu: int, quick: int) -> int:
        return quick if self.quick else cpu if self.device.type == "cpu" else full

    def note(self, words: str) -> str:
        return words if self.quick or self.device.type == "cpu" else ""
