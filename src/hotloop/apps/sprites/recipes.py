"""The two trainings, each through `hotloop.Loop`: learn to sort sprites, learn to draw them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

import hotloop
from hotloop.apps.sprites.dataset import SpriteSet
from hotloop.apps.sprites.drawing import guess_hidden
from hotloop.apps.sprites.models import Classifier, Drawer, Size, cost_of
from hotloop.apps.sprites.network_files import TrainedNetwork
from hotloop.errors import BadArgument, DoesNotFit
from hotloop.memory.usage import usage
from hotloop.printing.text import plural, size
from hotloop.ranks.group import world_size
from hotloop.records import Report

PER_WEIGHT = 16  # bytes: itself, its gradient, and two averages of AdamW, all in fp32


@dataclass(frozen=True)
class Recipe:
    """How long and how large to train."""

    width: int
    epochs: int
    batch: int = 128
    rate: float = 2e-3  # the highest learning rate; it climbs there and falls to nothing
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("width", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise BadArgument(f"{name}={getattr(self, name)}", fix=f"give {name} a whole number of at least 1")
        if not self.rate > 0:
            raise BadArgument(f"rate={self.rate}", fix="give a learning rate above 0")


def recipe_for(task: Literal["classify", "draw"], device: torch.device) -> Recipe:
    """What a minute or two on such a device is enough for."""
    on_gpu = device.type != "cpu"
    if task == "classify":
        return Recipe(width=48, epochs=6, batch=512) if on_gpu else Recipe(width=16, epochs=3, batch=64, rate=4e-3)
    return Recipe(width=64, epochs=12, batch=512) if on_gpu else Recipe(width=24, epochs=3, batch=64, rate=3e-3)


def sprites_for(device: torch.device) -> int:
    """How many sprites to make for a training on such a device."""
    return 8_192 if device.type == "cpu" else 262_144


def must_fit_memory(task: Literal["classify", "draw"], recipe: Recipe, device: torch.device, batch: int = 1) -> None:
    """Refuse a network that is too large to be trained here; to be asked before it is built and sprites are made."""
    cost = cost_of(Classifier if task == "classify" else Drawer, Size(16, recipe.width))
    needed = PER_WEIGHT * cost.weights + 4 * cost.outputs * (batch if device.type == "cpu" else 1)
    free = usage(device).free
    if free is not None and needed > free:
        in_batches = f" in batches of {batch:,}" if batch > 1 else ""
        raise DoesNotFit(
            f"a network of width {recipe.width:,} takes {size(needed)} or more to train{in_batches}, "
            f"and {size(free)} are free on {device}",
            fix="choose a smaller width" + (" or batch" if batch > 1 else ""),
        )


class FitOptions(TypedDict, total=False):
    """How a training is run, as `Loop.fit` takes it: what is shown, where it is saved, when it ends."""

    progress: bool | None
    save: str | Path | None
    every: str | float
    resume: bool
    time_limit: str | float | None


def learn_to_sort(
    sprites: SpriteSet,
    held_out: SpriteSet,
    recipe: Recipe,
    *,
    device: str | hotloop.Choice | None = None,
    **run: Unpack[FitOptions],
) -> tuple[TrainedNetwork, Report]:
    """A classifier of these sprites, judged on held-out ones after every epoch."""
    must_fit_memory("classify", recipe, hotloop.pick(device).device, min(recipe.batch, len(sprites)))
    torch.manual_seed(recipe.seed)
    model = Classifier(Size(len(sprites.classes), recipe.width))
    report = _fit(model, sprites, held_out, recipe, device, run, loss=nn.CrossEntropyLoss(label_smoothing=0.05))
    return TrainedNetwork("classifier", model, sprites.classes, sprites.palette, sprites.source), report


def learn_to_draw(
    sprites: SpriteSet, recipe: Recipe, *, device: str | hotloop.Choice | None = None, **run: Unpack[FitOptions]
) -> tuple[TrainedNetwork, Report]:
    """A drawer of sprites like these."""
    must_fit_memory("draw", recipe, hotloop.pick(device).device, min(recipe.batch, len(sprites)))
    torch.manual_seed(recipe.seed)
    model = Drawer(Size(len(sprites.classes), recipe.width))
    report = _fit(model, sprites, None, recipe, device, run, objective=guess_hidden)
    return TrainedNetwork("drawer", model, sprites.classes, sprites.palette, sprites.source), report


def _fit(
    model: nn.Module,
    sprites: SpriteSet,
    held_out: SpriteSet | None,
    recipe: Recipe,
    device: str | hotloop.Choice | None,
    run: FitOptions,
    **goal: Any,
) -> Report:
    if len(sprites) < recipe.batch:
        raise BadArgument(
            f"{plural(len(sprites), 'sprite')} are fewer than one batch of {recipe.batch}",
            fix="give more sprites or a smaller batch",
        )
    loader = batches(sprites, recipe.batch, seed=recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        recipe.rate,
        total_steps=recipe.epochs * math.ceil(len(loader) / world_size()),
        pct_start=0.15,
        cycle_momentum=hotloop.pick(device).device.type == "cpu",  # a CUDA graph would freeze it
    )
    loop = hotloop.Loop(model, optimizer, device=device, clip_norm=1.0, scheduler=schedule, **goal)
    return loop.fit(
        loader,
        epochs=recipe.epochs,
        validate=None if held_out is None else batches(held_out, 512),
        metrics=None if held_out is None else {"accuracy": correct},
        **run,
    )


def batches(sprites: SpriteSet, batch: int, *, seed: int | None = None) -> DataLoader[Any]:
    """A loader that takes whole batches out of the tensors at once; shuffled where a seed is given."""
    data: TensorDataset = sprites.dataset()
    if seed is None:
        return DataLoader(data, batch_size=None, sampler=BatchSampler(SequentialSampler(data), batch, drop_last=False))
    order = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    return DataLoader(data, batch_size=None, sampler=BatchSampler(order, batch, drop_last=True))


def correct(scores: Tensor, labels: Tensor) -> Tensor:
    """Whether each sprite was sorted into its class; the mean is the accuracy."""
    return scores.argmax(1) == labels
