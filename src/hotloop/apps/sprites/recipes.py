"""The two trainings, each through `hotloop.Loop`: learn to sort sprites, learn to draw them."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

import hotloop
from hotloop.apps.sprites.dataset import SpriteSet
from hotloop.apps.sprites.drawing import guess_hidden
from hotloop.apps.sprites.models import WIDEST, Classifier, Drawer, Size
from hotloop.apps.sprites.network_files import TrainedNetwork
from hotloop.errors import BadArgument
from hotloop.ranks.group import world_size
from hotloop.records import Report


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
        if self.width > WIDEST:
            raise BadArgument(f"width={self.width}", fix=f"the widest network has {WIDEST}")


def recipe_for(task: Literal["classify", "draw"], device: torch.device) -> Recipe:
    """What a minute or two on such a device is enough for."""
    on_gpu = device.type != "cpu"
    if task == "classify":
        return Recipe(width=48, epochs=6, batch=512) if on_gpu else Recipe(width=16, epochs=3, batch=64, rate=4e-3)
    return Recipe(width=64, epochs=12, batch=512) if on_gpu else Recipe(width=24, epochs=3, batch=64, rate=3e-3)


def sprites_for(device: torch.device) -> int:
    """How many sprites to make for a training on such a device."""
    return 8_192 if device.type == "cpu" else 262_144


def learn_to_sort(
    sprites: SpriteSet,
    held_out: SpriteSet,
    recipe: Recipe,
    *,
    device: str | hotloop.Choice | None = None,
    **run: Any,
) -> tuple[TrainedNetwork, Report]:
    """A classifier of these sprites, judged on held-out ones after every epoch; `run` goes to `Loop.fit`."""
    torch.manual_seed(recipe.seed)
    model = Classifier(Size(len(sprites.classes), recipe.width))
    report = _fit(model, sprites, held_out, recipe, device, run, loss=nn.CrossEntropyLoss(label_smoothing=0.05))
    return TrainedNetwork("classifier", model, sprites.classes, sprites.palette, sprites.source), report


def learn_to_draw(
    sprites: SpriteSet, recipe: Recipe, *, device: str | hotloop.Choice | None = None, **run: Any
) -> tuple[TrainedNetwork, Report]:
    """A drawer of sprites like these; `run` goes to `Loop.fit`."""
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
    run: dict[str, Any],
    **goal: Any,
) -> Report:
    if not len(sprites):
        raise BadArgument("there are no sprites to learn from", fix="give a set that has some")
    loader = batches(sprites, min(recipe.batch, len(sprites)), seed=recipe.seed)
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
