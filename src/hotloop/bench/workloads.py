"""The workloads: what is trained, in the size that suits the device, and the same for every contestant."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hotloop.bench.data import TextDataset, images, rows, tokens
from hotloop.bench.models import GPT, GPTSize, ResNet18, mlp, small_cnn
from hotloop.bench.packages import require
from hotloop.errors import BadArgument
from hotloop.sprites.drawing import guess_hidden
from hotloop.sprites.making import CLASSES, make
from hotloop.sprites.models import Drawer, Size

Criterion = Callable[[Any, Any], Tensor]
Objective = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class TrainingParts:
    """What one contestant trains; every contestant gets its own, and all are equal."""

    workload: str
    model: nn.Module
    optimizer: Optimizer
    loader: DataLoader[Any]
    loss: Criterion | None
    objective: Objective | None
    optimize: Callable[..., Optimizer]  # the same optimizer for whoever builds it with switches of their own

    def compute(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, as the loop of a tutorial would write it."""
        if self.objective is not None:
            return self.objective(model, batch)
        if self.loss is not None:
            inputs, targets = batch
            return self.loss(model(inputs), targets)
        loss: Tensor = model(**batch).loss
        return loss


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
    objective: Objective | None = None
    units_per_item: int = 1
    epochs: int = 1  # in a repeat
    workers: int = 0
    pinned: bool = False
    seed: int = 0
    note: str = ""  # how it differs from the full size

    @property
    def units(self) -> int:
        """What an epoch holds, in `unit`."""
        return self.items * self.units_per_item

    @property
    def steps(self) -> int:
        """Updates of the weights in an epoch."""
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
            pin_memory=self.pinned,
            generator=torch.Generator().manual_seed(self.seed),
        )
        optimizer = self.optimize(model.parameters())
        return TrainingParts(self.name, model, optimizer, loader, self.loss, self.objective, self.optimize)


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


def workload(name: str, device: str | torch.device, *, quick: bool = False, seed: int = 0) -> Workload:
    """The workload of this name for a device; `quick` is one that takes seconds, to see that everything works.

    >>> workload("mlp", "cpu").steps
    16
    """
    if name not in WORKLOADS:
        raise BadArgument(f"there is no workload {name!r}", fix=f"choose one of: {', '.join(WORKLOADS)}")
    made = WORKLOADS[name](Scale(torch.device(device), quick, seed))
    return replace(made, seed=seed)


def _mlp(scale: Scale) -> Workload:
    count = scale.pick(1024, 1024, 256)
    return Workload(
        name="mlp",
        unit="rows",
        dataset=TensorDataset(*rows(count, scale.seed)),
        items=count,
        batch=64,
        network=mlp,
        optimize=partial(Adam, lr=1e-3),
        loss=nn.MSELoss(),
        epochs=scale.pick(20, 5, 2),
        workers=scale.pick(2, 2, 0),
        pinned=scale.device.type == "cuda",
    )


def _cnn(scale: Scale) -> Workload:
    count = scale.pick(50_000, 2_128, 80)
    return Workload(
        name="cnn",
        unit="images",
        dataset=TensorDataset(*images(count, scale.seed)),
        items=count,
        batch=scale.pick(256, 256, 32),
        network=small_cnn,
        optimize=partial(Adam, lr=1e-3),
        loss=nn.CrossEntropyLoss(),
        epochs=scale.pick(2, 1, 1),
        note=scale.note(f"{count:,} images"),
    )


def _resnet18(scale: Scale) -> Workload:
    count, batch, width = scale.pick(50_000, 176, 40), scale.pick(256, 32, 16), scale.pick(64, 64, 8)
    return Workload(
        name="resnet18",
        unit="images",
        dataset=TensorDataset(*images(count, scale.seed)),
        items=count,
        batch=batch,
        network=partial(ResNet18, width=width),
        optimize=partial(SGD, lr=0.05, momentum=0.9, weight_decay=5e-4),
        loss=nn.CrossEntropyLoss(),
        note=scale.note(f"{count:,} images in batches of {batch}"),
    )


def _sprites(scale: Scale) -> Workload:
    count, batch, width = scale.pick(32_768, 160, 48), scale.pick(256, 32, 16), scale.pick(64, 64, 8)
    return Workload(
        name="sprites",
        unit="sprites",
        dataset=make(count, seed=scale.seed).dataset(),
        items=count,
        batch=batch,
        network=partial(Drawer, Size(len(CLASSES), width)),
        optimize=partial(AdamW, lr=1e-3, weight_decay=0.01),
        objective=guess_hidden,
        note=scale.note(f"{count:,} sprites in batches of {batch}"),
    )


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The objective of a language model: how surprised it is by each token that follows."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _gpt(scale: Scale) -> Workload:
    size = _small_gpt(scale) or GPTSize()
    count, batch = scale.pick(320, 32, 8), scale.pick(16, 4, 4)
    drawn = tokens(count, size.context + 1, size.vocabulary, scale.seed)
    return Workload(
        name="gpt",
        unit="tokens",
        units_per_item=size.context,
        dataset=TensorDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()),
        items=count,
        batch=batch,
        network=partial(GPT, size),
        optimize=partial(AdamW, lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95)),
        objective=next_token,
        note=scale.note(_small(size, batch)),
    )


def _gpt2(scale: Scale) -> Workload:
    transformers = require("transformers")
    small = _small_gpt(scale)
    shape = (
        {"vocab_size": 50_257}
        if small is None
        else {
            "vocab_size": small.vocabulary,
            "n_layer": small.layers,
            "n_head": small.heads,
            "n_embd": small.width,
            "n_positions": small.context,
            "bos_token_id": None,
            "eos_token_id": None,
        }
    )
    config = transformers.GPT2Config(**shape)
    count, batch, length = scale.pick(256, 32, 8), scale.pick(8, 4, 4), scale.pick(512, 128, 16)

    def network() -> nn.Module:
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # the default, of which it warns in every step
        return model

    return Workload(
        name="gpt2",
        unit="tokens",
        units_per_item=length,
        dataset=TextDataset(tokens(count, length, config.vocab_size, scale.seed)),
        items=count,
        batch=batch,
        network=network,
        optimize=partial(AdamW, lr=3e-4),
        note="" if small is None else _small(small, batch),
    )


def _small_gpt(scale: Scale) -> GPTSize | None:
    """What stands in where the full size would take days; None where it would not."""
    if scale.quick:
        return GPTSize(layers=2, heads=2, width=32, context=16, vocabulary=256)
    if scale.device.type == "cpu":
        return GPTSize(layers=4, heads=4, width=256, context=128, vocabulary=8_192)
    return None


def _small(size: GPTSize, batch: int) -> str:
    return f"a small one: {size.layers} layers, {size.width} wide, {batch}x{size.context} tokens"


WORKLOADS: dict[str, Callable[[Scale], Workload]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "resnet18": _resnet18,
    "sprites": _sprites,
    "gpt": _gpt,
    "gpt2": _gpt2,
}
