"""What trained networks are worth: confusions of a classifier, and how a drawer's sprites are judged."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

import hotloop
from hotloop.apps.sprites.dataset import SpriteSet
from hotloop.apps.sprites.drawing import draw
from hotloop.apps.sprites.models import Drawer
from hotloop.apps.sprites.network_files import TrainedNetwork
from hotloop.apps.sprites.recipes import batches
from hotloop.records import Record

CHUNK = 512  # sprites drawn at a time


@dataclass(frozen=True)
class DrawerScores(Record):
    """How a drawer's sprites fare before a classifier that was trained apart from it."""

    drawn: int
    right: float  # share that the classifier takes for the class that was asked for
    copies: float | None  # share that equals a training sprite to the pixel; None where those are not at hand
    right_by_class: dict[str, float]


@torch.inference_mode()
def sorted_by(classifier: TrainedNetwork, sprites: SpriteSet, device: str | torch.device) -> Tensor:
    """The classes that a classifier gives to sprites."""
    model = classifier.model.to(device).eval()
    found = [model(pixels).argmax(1) for pixels, _ in hotloop.stream(batches(sprites, CHUNK), device)]
    return torch.cat(found).cpu()


def confusions(classifier: TrainedNetwork, sprites: SpriteSet, device: str | torch.device) -> Tensor:
    """How many sprites of each class (rows) were taken for which (columns)."""
    found = sorted_by(classifier, sprites, device)
    count = len(sprites.classes)
    return torch.bincount(sprites.labels.cpu() * count + found, minlength=count * count).view(count, count)


def drawn_by(
    drawer: TrainedNetwork,
    labels: Tensor,
    device: str | torch.device,
    *,
    seed: int = 0,
    steps: int = 16,
    temperature: float = 0.7,
    progress: Callable[[int, int], None] | None = None,
) -> SpriteSet:
    """New sprites of these classes; `progress(done, total)` is called after each step of each part."""
    model = cast(Drawer, drawer.model.to(device).eval())
    chunks, parts = labels.split(CHUNK), []
    for i, chunk in enumerate(chunks):

        def tell(step: int, _: int, before: int = i * steps) -> None:
            if progress is not None:
                progress(before + step, len(chunks) * steps)

        drawn = draw(model, chunk.to(device), steps=steps, temperature=temperature, seed=seed + i, progress=tell)
        parts.append(drawn.cpu())
    return SpriteSet(torch.cat(parts), labels.cpu(), drawer.classes, drawer.palette, "drawn by hotloop")


def judge(
    drawn: SpriteSet, classifier: TrainedNetwork, learned_from: SpriteSet | None, device: str | torch.device
) -> DrawerScores:
    """Hold drawn sprites against a classifier and, where they are at hand, the sprites that the drawer learned from."""
    right = (sorted_by(classifier, drawn, device) == drawn.labels).float()
    copies = None
    if learned_from is not None:
        known = {sprite.tobytes() for sprite in learned_from.pixels.cpu().numpy()}
        copies = sum(sprite.tobytes() in known for sprite in drawn.pixels.cpu().numpy()) / len(drawn)
    labels = drawn.labels.unique().tolist()
    by_class = {drawn.classes[label]: right[drawn.labels == label].mean().item() for label in labels}
    return DrawerScores(len(drawn), right.mean().item(), copies, by_class)
